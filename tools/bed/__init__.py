"""The test bed: everything `dev.py` needs to turn a bare machine into one with a real ComfyUI, and to drive it.

Modules that run before the virtual environment exists (paths, steps, environment, comfyui, browser, server) use the
standard library only. client and demo run inside it.
"""
