// Memory that models leave to others. The server reads these settings itself (nodes/page/user_files.py), and goes by them from the next
// prompt on.

import { app } from "../../../scripts/app.js"

const RESERVE_SETTING = "FuseStream.Memory.Reserve"
const RAM_SETTING = "FuseStream.Memory.RAM"

app.registerExtension({
    name: "FuseStream.Memory",
    settings: [
        {
            id: RAM_SETTING,
            name: "RAM that streamed models may pin, GiB (0: automatic)",
            tooltip: "0: what is free, less a quarter of all. Less leaves more to other programs, and weights come more slowly where the file does not fit. Holds from the next run on.",
            category: ["FuseStream", "Memory", "RAM"],
            type: "number",
            attrs: { min: 0, max: 1024, step: 0.5, maxFractionDigits: 2 },
            defaultValue: 0,
        },
        {
            id: RESERVE_SETTING,
            name: "VRAM left to other programs, GiB (0: automatic)",
            tooltip: "As ComfyUI's --reserve-vram, for all its models, and in its place where it was not given. 0: ComfyUI's own reserve. Holds from the next run on.",
            category: ["FuseStream", "Memory", "Reserve"],
            type: "number",
            attrs: { min: 0, max: 1024, step: 0.1, maxFractionDigits: 2 },
            defaultValue: 0,
        },
    ],
})
