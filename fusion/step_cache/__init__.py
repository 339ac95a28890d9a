"""A cache of steps: some of a sampler's evaluations of the model are foretold from those before,
and the network is not run for them.

    settings.py   what a user asks for
    forecast.py   the denoised latents, foretold, and how far off they will be
    schedule.py   where a noise level lies among the sampler's steps, what a step is worth, and which
                  prompts take part
    model.py      a MODEL with it, and its samplings

What is foretold is the result of the whole evaluation, with guidance, regions, ControlNets, context
windows and all cards in it. Guidance adds prompts up, and so does the forecast: both may change
places.
"""
