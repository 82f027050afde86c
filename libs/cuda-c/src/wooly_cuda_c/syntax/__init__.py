"""The CUDA C that Wooly reads: text to tokens to a tree. Clients look at signatures, the compiler at everything."""
