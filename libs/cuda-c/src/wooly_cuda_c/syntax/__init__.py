"""The parser of CUDA C: text to tokens to a tree. Clients read only signatures; the compiler reads the whole tree."""
