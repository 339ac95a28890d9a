// Elements over the canvas that stay at their nodes, at the canvas's scale: they look the same with both of the front end's
// kinds of nodes, and change neither a node's size nor what a workflow saves. One goes when nothing is heard for it any more, unless
// it lasts. It is as wide as its node, and lies where it covers neither another nor a group's title: below it, above it, or else on
// its lower end; one that lasts beside it instead, for it would cover widgets that are being edited.

import { app } from "../../../scripts/app.js"
import { api } from "../../../scripts/api.js"
import { shownNode } from "./places.js"
import { isDark } from "./theme.js"

const SILENCE = 2000 // milliseconds without a word after which an element goes
const LOOK = 400 // milliseconds between two looks whether the place of one that lasts is still free
const LEAST = 160, MOST = 420 // its width, at scale 1
const GAP = 6
const BADGES = 22 // what LiteGraph draws above a title bar: the name of a node's pack

// The theme's own colours, and of the bars' colours such as stand out on them.
const STYLE = `
.fusestream-overlay {
    --used: #1a6fb5; --resident: #0d7f56; --streamed: #6b53cc; --now: #b35900;
    --lacks: #963000;
    --empty: color-mix(in srgb, var(--fg-color) 20%, var(--comfy-menu-bg));
    position: fixed; left: 0; top: 0; z-index: 10; box-sizing: border-box; padding: 6px 8px; pointer-events: none;
    transform-origin: 0 0; font: 12px/1.35 sans-serif; border-radius: 6px; border: 1px solid var(--border-color);
    background: var(--comfy-menu-bg); color: var(--fg-color);
}
.fusestream-overlay.fusestream-dark { --used: #4fa3e0; --resident: #3fbf8a; --streamed: #8f7ee0; --now: #ffb03b; --lacks: #ffb03b }
.fusestream-line { display: flex; flex-wrap: wrap; column-gap: 12px; overflow-wrap: anywhere }
.fusestream-words { font-size: 11px; overflow-wrap: anywhere }
.fusestream-bar { height: 6px; margin: 4px 0; background: var(--empty) }
.fusestream-bar > div { height: 100% }
.fusestream-overlay button { pointer-events: auto }
`
document.head.append(Object.assign(document.createElement("style"), { textContent: STYLE }))

const all = new Set()
let following = false

export function box(parent, name = "", style = {}) {
    const element = document.createElement("div")
    element.className = name
    Object.assign(element.style, style)
    parent.append(element)
    return element
}

/** A line of words, and how to say them: parts that stay together, and come below each other where they do not fit. */
export function line(parent) {
    const element = box(parent, "fusestream-line")
    return parts => {
        while (element.children.length > parts.length) element.lastChild.remove()
        parts.forEach((words, i) => { (element.children[i] ?? box(element)).textContent = words })
    }
}

/** A bar; what of it is full is its width in percent. */
export const bar = (parent, colour) => box(box(parent, "fusestream-bar"), "", { background: `var(--${colour})` })

/** One kind of them, one for each node. fill: makes the parts of an element, which `show` gets with what there is to show. lasts:
    whether one stays until it is removed. */
export class Overlays {
    constructor(name, fill, show, { lasts = false } = {}) {
        this.name = name
        this.fill = fill
        this.show = show
        this.lasts = lasts
        this.shown = new Map() // node id -> { element, parts, until, node, place, looked, seen }
        all.add(this)
        for (const end of ["execution_success", "execution_error", "execution_interrupted"]) {
            api.addEventListener(end, () => this.clear())
        }
    }

    hear(id, told) {
        if (!this.shown.has(id)) this.shown.set(id, this.#made(id))
        const one = this.shown.get(id)
        one.until = this.lasts ? Infinity : performance.now() + SILENCE
        this.show(one.parts, told)
        one.place = undefined // it may be higher now, or a node may have been moved
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
        const element = box(document.body, "fusestream-overlay", { display: "none" })
        element.dataset[this.name] = id
        return { element, parts: this.fill(element), until: 0 }
    }
}

/** Each frame, while there is an element: put it to its node. */
function follow() {
    following = false
    for (const kind of all) {
        for (const [id, one] of kind.shown) {
            if (performance.now() > one.until) {
                kind.remove(id)
                continue
            }
            following = true
            const node = isCanvasShown() ? shownNode(id) : undefined
            if (kind.lasts && rests(one, node)) continue
            put(one, node, kind.lasts)
        }
    }
    if (following) requestAnimationFrame(follow)
}

/** Not so in app mode, which shows inputs and results alone. */
const isCanvasShown = () => app.canvas.canvas.offsetWidth > 0

/** Put one to its node, or out of sight where that is in no graph that is open. */
function put(one, node, lasts) {
    one.element.style.display = node ? "" : "none"
    if (!node) return
    one.element.classList.toggle("fusestream-dark", isDark())
    const { scale } = app.canvas.ds, at = boxOf(node)
    one.element.style.width = `${Math.min(MOST, Math.max(LEAST, (at.right - at.left) / scale))}px`
    const size = [one.element.offsetWidth * scale, one.element.offsetHeight * scale, GAP * scale]
    const places = (lasts ? beside : around)(at, node.graph.groups.map(titleOf), ...size)
    if (one.place === undefined || one.node !== node) {
        one.place = places.findIndex(place => free(place, node, one.element))
        one.node = node
    }
    const { left, top } = places[Math.min(Math.max(0, one.place), places.length - 1)]
    if (lasts && one.place < 0) one.element.style.display = "none" // there is room nowhere
    one.element.style.transform = `translate(${left}px, ${top}px) scale(${scale})`
}

/** Whether there is nothing to do for one that lasts: neither the canvas nor its node has moved, and it was looked at just now. */
function rests(one, node) {
    const now = performance.now(), { scale, offset } = app.canvas.ds
    const seen = node && [scale, ...offset, ...node.pos, ...node.size, node.flags.collapsed, node.id].join()
    const isDue = one.place === undefined || now - one.looked > LOOK
    if (!isDue && seen === one.seen && node === one.node) return true
    one.seen = seen
    if (isDue) Object.assign(one, { looked: now, place: undefined })
    return false
}

/** Where something of this size may lie at a node, the best first: below, above, on it from its lower end up to its title. */
function around(box, titles, width, height, gap) {
    const places = outside(box, titles, width, height, gap)
    for (let y = box.bottom - gap - height; y > box.top + 5 * gap; y -= 2 * gap) places.push(rectangle(box.left, y, width, height))
    return places
}

/** The same for one that covers nothing: below, above, at its right, at its left. */
function beside(box, titles, width, height, gap) {
    const sides = [box.right + gap, box.left - gap - width]
    return [...outside(box, titles, width, height, gap), ...sides.map(left => rectangle(left, box.top, width, height))]
}

/** Below it, above it, and above the title of the group that it is in. */
function outside({ left, top, bottom }, titles, width, height, gap) {
    const above = rectangle(left, top - gap - height, width, height), over = titles.find(title => meet(title, above))
    const places = [rectangle(left, bottom + gap, width, height), above]
    return over ? [...places, rectangle(left, over.top - gap - height, width, height)] : places
}

const rectangle = (left, top, width, height) => ({ left, top, right: left + width, bottom: top + height })

/** Whether no other node lies there, nor a group's title, nor another of these elements. */
function free(place, node, element) {
    const others = [...node.graph.nodes.filter(each => each !== node).map(boxOf), ...node.graph.groups.map(titleOf)]
    for (const { shown } of all) {
        for (const one of shown.values()) {
            if (one.element !== element && one.node && one.element.style.display === "") others.push(one.element.getBoundingClientRect())
        }
    }
    return !others.some(other => meet(place, other))
}

const meet = (one, other) => one.left < other.right && other.left < one.right && one.top < other.bottom && other.top < one.bottom

/** A group's title on the page. */
function titleOf({ pos: [x, y], size: [width], titleHeight }) {
    const [left, top] = app.canvasPosToClientPos([x, y]), [right, bottom] = app.canvasPosToClientPos([x + width, y + titleHeight])
    return { left, top, right, bottom }
}

/** A node on the page, with its title; drawn as an element it may be higher than the graph knows. */
function boxOf(node) {
    const element = document.querySelector(`[data-node-id="${node.id}"]`)
    if (element) return element.getBoundingClientRect()
    const [x, y, width, height] = node.boundingRect
    const badges = node.badges.some(badge => (typeof badge === "function" ? badge() : badge).visible) ? BADGES : 0
    const [left, top] = app.canvasPosToClientPos([x, y - badges])
    const [right, bottom] = app.canvasPosToClientPos([x + width, y + height])
    return { left, top, right, bottom }
}
