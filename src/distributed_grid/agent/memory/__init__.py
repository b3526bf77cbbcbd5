"""A node's part of the memory pool: the process that holds blocks, its protocol, and the agent's calls for it."""
