"""Records what a session sends into one file, a bundle, and replays it without the script (`wooly record`, `wooly replay`).

`bundle` is the format, `record` writes it while a script runs, `programs` and `tensors` say what its programs do to buffers,
`sessions` opens sessions without a device of PyTorch, `replay` sends the frames again, `compare` finds the first instruction
whose results differ between two executors.
"""
