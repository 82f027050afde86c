"""The WIS instruction set: types, op table, program, codec, verifier, frames, control messages."""
