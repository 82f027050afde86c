"""The most that a reader of WIS takes in at once. Memory and time of a reader grow with each of these, so each has a limit.

The clients' recorder stays below: 128 instructions by default, 4,096 at most, 32,768 in a graph of `torch.compile`, and the frees
of what has died since.
"""

from __future__ import annotations

from typing import Final

#: Bytes of one program's definition. A graph of 32,768 instructions of 16,384 forms has about 3 MiB.
MAX_PROGRAM_BYTES: Final = 4 << 20
#: Instructions of one program. Checking and preparing one takes 50 to 100 us, and keeping it about 2 KiB.
MAX_INSTRUCTIONS: Final = 65_536
#: Different instructions (forms) of one program.
MAX_FORMS: Final = 16_384
#: Slots that all instructions of one program name, each time one is named. A fused optimizer step names six per parameter.
MAX_REFERENCES: Final = 262_144
#: Params that one run of a program takes.
MAX_PARAMS: Final = 131_072
#: Buffers that are to be freed after one run. 65,536 take some 30 ms; a client with more sends them with its next runs.
MAX_FREES: Final = 65_536
#: Operands and values of attributes, in one form and in all forms of a program. An operator on 8,192 tensors has 16,384.
MAX_FORM_NODES: Final = 32_768
MAX_NODES: Final = 262_144

#: Bytes of one module, without its constants, and the steps and programs in it.
MAX_MODULE_BYTES: Final = 16 << 20
MAX_MODULE_STEPS: Final = 131_072
MAX_MODULE_PROGRAMS: Final = 4_096
#: Instructions, and operands and values of attributes, of all programs of a module.
MAX_MODULE_INSTRUCTIONS: Final = 262_144
MAX_MODULE_NODES: Final = 1 << 20
#: Buffers that all steps of a module name, each time one is named.
MAX_MODULE_REFERENCES: Final = 2 << 20
