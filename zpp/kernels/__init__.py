"""Kernels: the four functions of `zpp.reference`, fused, one object per kind of device."""
