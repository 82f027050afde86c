"""Run a sample of the operator, module and optimizer databases in one process.

Importing PyTorch's test databases takes longer than running the sample, so all share one import.

Run: python sample.py ENDPOINT TOKEN
It prints `{"database": NAME}` before the lines of the program with this name.
"""

import json
import sys
import warnings

import torch

#: By database: the sample takes one of this many units, and this many samples of it. The step widths are primes, so that every
#: variant and dtype occurs, each time with another operator.
SAMPLE = {"opinfo": (307, 2), "modules": (67, 2), "optimizers": (13, 1), "announced": (211, 2)}


def main():
    import announced
    import modules
    import opinfo
    import optimizers
    from comparison import Report
    from wooly import api

    torch.set_num_threads(1)
    # fake tensors on CUDA's device, before "cuda" is the Wooly device
    every, samples = SAMPLE["announced"]
    announced.FAKES.know(announced.units()[::every], samples)
    api.attach([sys.argv[1]], "standalone", sys.argv[2])
    api.install_facade()
    for database in (opinfo, modules, optimizers, announced):
        every, samples = SAMPLE[database.__name__]
        print(json.dumps({"database": database.__name__}))
        for unit in database.units()[::every]:
            database.run_unit(Report(), unit, "cuda", samples)
    api.disable()


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        main()
