// The live meter: below a loader whose model streams, VRAM against its budget, which blocks stay, the rate of the bus.
// The server says how it goes, four times a second at most (nodes/meter.py).

import { app } from "../../../scripts/app.js"
import { api } from "../../../scripts/api.js"
import { Overlays, bar, box, line } from "./overlays.js"

const SETTING = "FuseStream.Meter.Enabled"
const COLOURS = { used: "#4fa3e0", resident: "#3fbf8a", streamed: "#8f7ee0", now: "#ffb03b" }

const gib = bytes => (bytes >= 0.1 * 2 ** 30 ? `${(bytes / 2 ** 30).toFixed(2)} GiB` : `${(bytes / 2 ** 20).toFixed(1)} MiB`)

const meters = new Overlays("fusestreamMeter", fill, show)

function fill(element) {
    return { words: line(element), used: bar(element, COLOURS.used), blocks: box({ display: "flex", gap: "1px", height: "8px" }, element) }
}

function show({ words, used, blocks }, reading) {
    const rate = `${(reading.rate / 1e9).toFixed(1)} GB/s`
    const waiting = `${Math.round(100 * reading.waiting)}% waiting`
    words.textContent = `VRAM ${gib(reading.held)} of ${gib(reading.limit)} | ${rate} | ${waiting}`
    used.style.width = `${Math.min(100, (100 * reading.held) / Math.max(1, reading.limit))}%`
    while (blocks.children.length < reading.blocks) box({ flex: "1" }, blocks)
    while (blocks.children.length > reading.blocks) blocks.lastChild.remove()
    const resident = new Set(reading.resident)
    for (let i = 0; i < reading.blocks; i++) {
        const kind = i === reading.block ? "now" : resident.has(i) ? "resident" : "streamed"
        blocks.children[i].style.background = COLOURS[kind]
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
