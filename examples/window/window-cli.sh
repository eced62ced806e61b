#!/bin/sh
# A causal window with sinks on the command line: its pairs, its cost, and the kernels it would use.
set -e
longspan inspect "causal & (window(64, 0) | sinks(4))" --tokens 301 --json
