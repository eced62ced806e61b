"""Peak memory and time of one training step of a LongNet, with or without activation checkpointing.

    python examples/longnet/checkpoint_memory.py
    python examples/longnet/checkpoint_memory.py --checkpoint

Each in a process of its own: the peak is that of the whole process.
"""

import argparse
import re
import time

import torch
from longspan.torch import LongNetLM

parser = argparse.ArgumentParser()
parser.add_argument("--checkpoint", action="store_true")
parser.add_argument("--tokens", type=int, default=65_536)
parser.add_argument("--layers", type=int, default=6)
arguments = parser.parse_args()

model = LongNetLM(
    hidden_size=512,
    num_hidden_layers=arguments.layers,
    num_attention_heads=8,
    intermediate_size=2048,
    checkpoint=arguments.checkpoint,
)
ids = torch.randint(256, (1, arguments.tokens))
start, start_cpu = time.monotonic(), time.process_time()
loss = torch.nn.functional.cross_entropy(model(ids)[0, :-1], ids[0, 1:])
torch.autograd.backward(loss)
seconds, cpu = time.monotonic() - start, time.process_time() - start_cpu
with open("/proc/self/status") as status:
    (peak,) = re.findall(r"VmHWM:\s+(\d+) kB", status.read())
print(
    f"{arguments.tokens} tokens, {arguments.layers} layers, checkpoint={arguments.checkpoint}, "
    f"{torch.get_num_threads()} threads: {int(peak) / 2**20:.1f} GiB, {seconds:.0f} s, {cpu:.0f} s of CPU time"
)
