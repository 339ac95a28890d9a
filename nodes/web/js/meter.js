// The live meter: below a loader whose model streams, memory against its budget, which blocks stay, the rate of the bus.
// The server says how it goes, four times a second at most (nodes/page/meter.py).

import { app } from "../../../scripts/app.js"
import { api } from "../../../scripts/api.js"
import { Overlays, bar, box, line } from "./overlays.js"
import { gib } from "./units.js"
import { words } from "./words.js"

const SETTING = "FuseStream.Meter.Enabled"

const meters = new Overlays("fusestreamMeter", fill, show)

function fill(element) {
    return { say: line(element), used: bar(element, "used"), blocks: box(element, "", { display: "flex", gap: "1px", height: "8px" }) }
}

function show({ say, used, blocks }, reading) {
    say([
        words("held", { memory: reading.memory, held: gib(reading.held), limit: gib(reading.limit) }),
        `${(reading.rate / 1e9).toFixed(1)} GB/s`,
        words("waiting", { percent: Math.round(100 * reading.waiting) }),
    ])
    used.style.width = `${Math.min(100, (100 * reading.held) / Math.max(1, reading.limit))}%`
    while (blocks.children.length < reading.blocks) box(blocks, "", { flex: "1" })
    while (blocks.children.length > reading.blocks) blocks.lastChild.remove()
    const resident = new Set(reading.resident)
    for (let i = 0; i < reading.blocks; i++) {
        const kind = i === reading.block ? "now" : resident.has(i) ? "resident" : "streamed"
        blocks.children[i].style.background = `var(--${kind})`
    }
}

app.registerExtension({
    name: "FuseStream.Meter",
    settings: [
        {
            id: SETTING,
            name: "Live meter below loaders while a model streams",
            tooltip: "VRAM against its budget, which blocks stay, the rate of the bus. Four messages a second at most.",
            category: ["FuseStream", "Meter", "Enabled"],
            type: "boolean",
            defaultValue: true,
            onChange: on => on || meters.clear(),
        },
    ],
    setup() {
        api.addEventListener("fusestream.meter", ({ detail }) => {
            if (app.extensionManager.setting.get(SETTING)) meters.hear(String(detail.node), detail)
        })
    },
})
