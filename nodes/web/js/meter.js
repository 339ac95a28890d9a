// The live meter: below a loader whose model streams, VRAM against its budget, which blocks stay, the rate of the bus.
//
// The server says how it goes, four times a second at most (nodes/meter.py). The meter is an element over the canvas, so it
// looks the same with both of the front end's kinds of nodes; it follows its node, and goes when nothing is heard any more.

import { app } from "../../../scripts/app.js"
import { api } from "../../../scripts/api.js"

const SETTING = "FuseStream.Meter.Enabled"
const SILENCE = 2000 // milliseconds without a word after which a meter goes
const WIDTH = 330
const COLOURS = { used: "#4fa3e0", resident: "#3fbf8a", streamed: "#8f7ee0", now: "#ffb03b", ground: "#1b1e24", ink: "#e8eaee" }

const meters = new Map() // node id -> { element, until }
let following = false

const gib = bytes => (bytes >= 0.1 * 2 ** 30 ? `${(bytes / 2 ** 30).toFixed(2)} GiB` : `${(bytes / 2 ** 20).toFixed(1)} MiB`)

function box(style, parent) {
    const element = document.createElement("div")
    Object.assign(element.style, style)
    parent?.append(element)
    return element
}

/** An element with all parts of a meter; `show` writes a reading into it. */
function make(id) {
    const element = box({
        position: "fixed", left: "0", top: "0", width: `${WIDTH}px`, padding: "6px 8px", boxSizing: "border-box", zIndex: "10",
        pointerEvents: "none", transformOrigin: "0 0", background: COLOURS.ground, color: COLOURS.ink, borderRadius: "6px",
        font: "12px sans-serif", opacity: "0.94",
    }, document.body)
    element.dataset.fusestreamMeter = id
    const words = box({ whiteSpace: "nowrap", overflow: "hidden", textOverflow: "ellipsis" }, element)
    const bar = box({ height: "6px", margin: "4px 0", background: "#3a404b" }, element)
    const used = box({ height: "100%", background: COLOURS.used }, bar)
    const blocks = box({ display: "flex", gap: "1px", height: "8px" }, element)
    return { element, words, used, blocks, until: 0 }
}

function show(meter, reading) {
    const rate = `${(reading.rate / 1e9).toFixed(1)} GB/s`
    const waiting = `${Math.round(100 * reading.waiting)}% waiting`
    meter.words.textContent = `VRAM ${gib(reading.held)} of ${gib(reading.limit)} | ${rate} | ${waiting}`
    meter.used.style.width = `${Math.min(100, (100 * reading.held) / Math.max(1, reading.limit))}%`
    while (meter.blocks.children.length < reading.blocks) box({ flex: "1" }, meter.blocks)
    while (meter.blocks.children.length > reading.blocks) meter.blocks.lastChild.remove()
    const resident = new Set(reading.resident)
    for (let i = 0; i < reading.blocks; i++) {
        const kind = i === reading.block ? "now" : resident.has(i) ? "resident" : "streamed"
        meter.blocks.children[i].style.background = COLOURS[kind]
    }
}

function remove(id) {
    meters.get(id)?.element.remove()
    meters.delete(id)
}

/** Each frame, while there is a meter: put it below its node, at the canvas's scale. */
function follow() {
    for (const [id, meter] of meters) {
        if (performance.now() > meter.until) {
            remove(id)
            continue
        }
        const graph = app.canvas.graph ?? app.graph
        // In a subgraph an id is a path; the last part is the node's own.
        const node = graph?.nodes.find(one => String(one.id) === id.split(":").pop())
        meter.element.style.display = node ? "" : "none"
        if (!node) continue
        const [x, y] = app.canvasPosToClientPos([node.pos[0], node.pos[1] + node.size[1] + 8])
        meter.element.style.transform = `translate(${x}px, ${y}px) scale(${app.canvas.ds.scale})`
    }
    following = meters.size > 0
    if (following) requestAnimationFrame(follow)
}

function onReading({ detail }) {
    if (!app.extensionManager.setting.get(SETTING)) return
    const id = String(detail.node)
    if (!meters.has(id)) meters.set(id, make(id))
    const meter = meters.get(id)
    meter.until = performance.now() + SILENCE
    show(meter, detail)
    if (!following) {
        following = true
        requestAnimationFrame(follow)
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
            onChange: on => on || [...meters.keys()].forEach(remove),
        },
    ],
    setup() {
        api.addEventListener("fusestream.meter", onReading)
        for (const end of ["execution_success", "execution_error", "execution_interrupted"]) {
            api.addEventListener(end, () => [...meters.keys()].forEach(remove))
        }
    },
})
