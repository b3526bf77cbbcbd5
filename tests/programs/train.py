"""Trains a small network and prints every loss to its last digit: `train.py STEPS [STEP_S] [EXIT_CODE]`.

With PyTorch where it is installed, else the same in numpy. Any number lost or changed shows in all losses after it.
"""

import sys
import time

import numpy as np

steps, step_s = int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
exit_code = int(sys.argv[3]) if len(sys.argv) > 3 else 0
random = np.random.default_rng(7)
inputs = random.standard_normal((256, 16))
wanted = np.sin(inputs.sum(axis=1, keepdims=True))
first, second = random.standard_normal((16, 32)) / 4, random.standard_normal((32, 1)) / 4

try:
    import torch
except ImportError:

    def step() -> float:
        global first, second
        hidden = np.tanh(inputs @ first)
        error = hidden @ second - wanted
        slope = 2 * error / len(inputs)
        back = slope @ second.T * (1 - hidden**2)
        second = second - 0.05 * (hidden.T @ slope)
        first = first - 0.05 * (inputs.T @ back)
        return float((error**2).mean())

else:
    torch.manual_seed(7)
    weights = [torch.tensor(one, requires_grad=True) for one in (first, second)]
    optimizer = torch.optim.Adam(weights, lr=0.01)
    data, target = torch.tensor(inputs), torch.tensor(wanted)

    def step() -> float:
        optimizer.zero_grad()
        loss = ((torch.tanh(data @ weights[0]) @ weights[1] - target) ** 2).mean()
        loss.backward()
        optimizer.step()
        return float(loss)


for number in range(1, steps + 1):
    print(number, step().hex(), flush=True)
    time.sleep(step_s)
sys.exit(exit_code)
