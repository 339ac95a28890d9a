"""Builds the device code: the (unit x variant) matrix, NVRTC, ninja, the archive and the report.

Standard library only, without imports from the rest of the pack, because ninja starts one small
process per compilation.

    python kernels_cuda/build              build what changed, pack the archive, print the report
"""
