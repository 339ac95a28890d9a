// What new FuseStream loaders begin with, by the user's settings. A saved workflow's own values are put in after this, and stay.

import { app } from "../../../scripts/app.js"

const KERNELS_SETTING = "FuseStream.Defaults.Kernels"
const QUALITY_SETTING = "FuseStream.Defaults.Quality"
// A widget, and of it what a setting's value means: loaders without a quality have a precision.
const PRECISIONS = { Exact: "precise", Balanced: "fast", Fastest: "turbo" }
const WIDGETS = {
    kernels: () => app.extensionManager.setting.get(KERNELS_SETTING),
    quality: () => app.extensionManager.setting.get(QUALITY_SETTING),
    precision: node => node.widgets.some(each => each.name === "quality") ? "precise" : PRECISIONS[app.extensionManager.setting.get(QUALITY_SETTING)],
}
const BY_PRECISION = "by precision"
const LOADERS = [
    "FuseStreamDiffusionModelLoader", "FuseStreamTextEncoderLoader", "FuseStreamVAELoader", "FuseStreamCheckpointLoader",
]

app.registerExtension({
    name: "FuseStream.Defaults",
    settings: [
        {
            id: QUALITY_SETTING,
            name: "Quality of new loaders",
            tooltip: "What a FuseStream loader begins with when you add it. Those in your workflows stay as they are.",
            category: ["FuseStream", "New loaders", "Quality"],
            type: "combo",
            options: Object.keys(PRECISIONS),
            defaultValue: "Exact",
        },
        {
            id: KERNELS_SETTING,
            name: "Kernels of new loaders",
            tooltip: "What a FuseStream loader begins with when you add it. Those in your workflows stay as they are.",
            category: ["FuseStream", "New loaders", "Kernels"],
            type: "combo",
            options: ["auto", "on", "off"],
            defaultValue: "auto",
        },
    ],
    nodeCreated(node) {
        if (!LOADERS.includes(node.comfyClass)) return
        goByPrecision(node)
        for (const [name, of] of Object.entries(WIDGETS)) {
            const widget = node.widgets.find(each => each.name === name), chosen = widget && of(node)
            if (widget?.options.values.includes(chosen)) widget.value = chosen
        }
    },
})

/** Where a precision was chosen, by hand or by a workflow from before there was a quality, the quality leaves it to that. */
function goByPrecision(node) {
    const [quality, precision] = ["quality", "precision"].map(name => node.widgets.find(each => each.name === name))
    if (!quality) return
    const callback = precision.callback, onConfigure = node.onConfigure
    precision.callback = function (...told) {
        quality.value = BY_PRECISION
        return callback?.apply(this, told)
    }
    const place = node.widgets.filter(each => each.serialize !== false).indexOf(quality)
    node.onConfigure = function (saved) {
        onConfigure?.call(this, saved)
        if (saved.widgets_values && saved.widgets_values[place] === undefined) quality.value = BY_PRECISION
    }
}
