"""Wrappers around a whole sampling, streamed or not.

checks.py          whether model, latents and prompts go together
step_timer.py      how fast it goes
measured.py        how long steps took here, kept between starts
kernel_choices.py  whether kernels were chosen meanwhile
"""
