// What new FuseStream nodes begin with, by the user's settings and theme. A saved workflow's own values are put in after this, and stay.

import { app } from "../../../scripts/app.js"
import { BY_PRECISION, hideAdvanced } from "./advanced.js"
import { isDark } from "./theme.js"

const KERNELS_SETTING = "FuseStream.Defaults.Kernels"
const QUALITY_SETTING = "FuseStream.Defaults.Quality"
const QUALITIES = ["auto", "Exact", "Balanced", "Fastest"] // as the loaders have them (fusion/base/format.py)
const WIDGETS = {
    kernels: () => app.extensionManager.setting.get(KERNELS_SETTING),
    quality: () => app.extensionManager.setting.get(QUALITY_SETTING),
}
const KERNELS_NODES = ["FuseStreamKernels", "FuseStreamTextEncoderKernels", "FuseStreamVAEKernels"]
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
            options: QUALITIES,
            defaultValue: QUALITIES[0],
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
        if (node.comfyClass?.startsWith("FuseStream")) followTheme(node)
        if (KERNELS_NODES.includes(node.comfyClass)) keepsOldDefault(node, "precision", "precise")
        if (!LOADERS.includes(node.comfyClass)) return
        goByPrecision(node)
        for (const [name, of] of Object.entries(WIDGETS)) {
            const widget = node.widgets.find(each => each.name === name), chosen = widget && of()
            if (widget?.options.values.includes(chosen)) widget.value = chosen
        }
        hideAdvanced(node)
    },
})

/** A node that draws a picture draws it for the page as it is now. */
function followTheme(node) {
    const widget = node.widgets?.find(each => each.name === "theme")
    if (widget) widget.value = isDark() ? "dark" : "light"
}

/** Where a precision was chosen, by hand or by a workflow from before there was a quality, the quality leaves it to that. */
function goByPrecision(node) {
    const [quality, precision] = ["quality", "precision"].map(name => node.widgets.find(each => each.name === name))
    const callback = precision.callback
    precision.callback = function (...told) {
        quality.value = BY_PRECISION
        return callback?.apply(this, told)
    }
    keepsOldDefault(node, "quality", BY_PRECISION)
}

/** A workflow that was saved before there was this widget computes as it did: the widget has the value that means so. */
function keepsOldDefault(node, name, value) {
    const widget = node.widgets.find(each => each.name === name), onConfigure = node.onConfigure
    const place = node.widgets.filter(each => each.serialize !== false).indexOf(widget)
    node.onConfigure = function (saved) {
        onConfigure?.call(this, saved)
        if (saved.widgets_values && saved.widgets_values[place] === undefined) widget.value = value
    }
}
