"""Building the device code: the (unit x variant) matrix, NVRTC, ninja, the archive and the report.

Standard library only, and no import of the rest of the pack: ninja starts one small process per compilation.
    python kernels_cuda/build                   build what changed, pack the archive, print the report
"""
