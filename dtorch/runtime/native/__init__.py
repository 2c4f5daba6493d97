"""The native executor: C++ threads that run the programs without the interpreter lock."""
