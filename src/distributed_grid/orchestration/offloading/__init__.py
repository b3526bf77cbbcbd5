"""Moving running processes: detect, classify, match, check, plan. Everything here decides; nothing here does.

General layout: `model` has the states and the plain data; `classifier` says what a process is; `detector` what is worth
moving and what never may be; `matcher` where it could go; `preflight` what stands in the way; `planner` puts a plan
together from all of these.
"""
