// Elements over the canvas that stay below their nodes, at the canvas's scale: they look the same with both of the front end's
// kinds of nodes, and change neither a node's size nor what a workflow saves. One goes when nothing is heard for it any more.

import { app } from "../../../scripts/app.js"
import { api } from "../../../scripts/api.js"

const SILENCE = 2000 // milliseconds without a word after which an element goes
const WIDTH = 330
const GROUND = "#1b1e24", INK = "#e8eaee", EMPTY = "#3a404b"

const all = new Set()
let following = false

export function box(style, parent) {
    const element = document.createElement("div")
    Object.assign(element.style, style)
    parent?.append(element)
    return element
}

/** A line of words. */
export const line = parent => box({ whiteSpace: "nowrap", overflow: "hidden", textOverflow: "ellipsis" }, parent)

/** A bar; what of it is full is its width in percent. */
export function bar(parent, colour) {
    return box({ height: "100%", background: colour }, box({ height: "6px", margin: "4px 0", background: EMPTY }, parent))
}

/** One kind of them, one for each node. fill: makes the parts of an element, which `show` gets with what there is to show. */
export class Overlays {
    constructor(name, fill, show) {
        this.name = name
        this.fill = fill
        this.show = show
        this.shown = new Map() // node id -> { element, parts, until }
        all.add(this)
        for (const end of ["execution_success", "execution_error", "execution_interrupted"]) {
            api.addEventListener(end, () => this.clear())
        }
    }

    hear(id, told) {
        if (!this.shown.has(id)) this.shown.set(id, this.#made(id))
        const one = this.shown.get(id)
        one.until = performance.now() + SILENCE
        this.show(one.parts, told)
        if (!following) {
            following = true
            requestAnimationFrame(follow)
        }
    }

    clear() {
        for (const id of [...this.shown.keys()]) this.remove(id)
    }

    remove(id) {
        this.shown.get(id)?.element.remove()
        this.shown.delete(id)
    }

    #made(id) {
        const element = box({
            position: "fixed", left: "0", top: "0", width: `${WIDTH}px`, padding: "6px 8px", boxSizing: "border-box", zIndex: "10",
            pointerEvents: "none", transformOrigin: "0 0", background: GROUND, color: INK, borderRadius: "6px",
            font: "12px sans-serif", opacity: "0.94",
        }, document.body)
        element.dataset[this.name] = id
        return { element, parts: this.fill(element), until: 0 }
    }
}

/** Each frame, while there is an element: put it below its node. */
function follow() {
    following = false
    for (const kind of all) {
        for (const [id, one] of kind.shown) {
            if (performance.now() > one.until) {
                kind.remove(id)
                continue
            }
            following = true
            const graph = app.canvas.graph ?? app.graph
            // In a subgraph an id is a path; the last part is the node's own.
            const node = graph?.nodes.find(each => String(each.id) === id.split(":").pop())
            one.element.style.display = node ? "" : "none"
            if (!node) continue
            const [x, y] = app.canvasPosToClientPos([node.pos[0], node.pos[1] + node.size[1] + 8])
            one.element.style.transform = `translate(${x}px, ${y}px) scale(${app.canvas.ds.scale})`
        }
    }
    if (following) requestAnimationFrame(follow)
}
