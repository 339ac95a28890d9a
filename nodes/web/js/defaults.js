// What new FuseStream loaders begin with, by the user's settings. A saved workflow's own values are put in after this, and stay.

import { app } from "../../../scripts/app.js"

const KERNELS_SETTING = "FuseStream.Defaults.Kernels"
const PRECISION_SETTING = "FuseStream.Defaults.Precision"
const WIDGETS = { kernels: KERNELS_SETTING, precision: PRECISION_SETTING }
const LOADERS = ["FuseStreamDiffusionModelLoader", "FuseStreamTextEncoderLoader", "FuseStreamVAELoader"]

app.registerExtension({
    name: "FuseStream.Defaults",
    settings: [
        {
            id: PRECISION_SETTING,
            name: "Precision of new loaders",
            tooltip: "What a FuseStream loader begins with when you add it. Those in your workflows stay as they are.",
            category: ["FuseStream", "New loaders", "Precision"],
            type: "combo",
            options: ["precise", "fast", "turbo"],
            defaultValue: "precise",
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
        for (const [name, setting] of Object.entries(WIDGETS)) {
            const widget = node.widgets.find(each => each.name === name), chosen = app.extensionManager.setting.get(setting)
            if (widget.options.values.includes(chosen)) widget.value = chosen
        }
    },
})
