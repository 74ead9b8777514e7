"""Kernels of our own for float32 models on a CPU, compiled where there is a C++ compiler."""
