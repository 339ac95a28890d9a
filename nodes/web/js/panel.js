// The panel at the side of the page: the models in memory, what each holds, and a button to let go of it; the last runs; the doctor.
// It asks the server when it is opened, and then when the server says that something has changed.

import { app } from "../../../scripts/app.js"
import { api } from "../../../scripts/api.js"
import { MENU_LABEL, showDoctor } from "./doctor.js"
import { asked, askedReports, lastTwo, runOf, showOne, showPair, showReports, timeOf } from "./reports.js"
import { button } from "./text_box.js"
import { onTimeLeft } from "./time_left.js"
import { gib } from "./units.js"
import { translatedLabel, words } from "./words.js"

const EVERY = 1000 // milliseconds between two looks while a model streams
const STYLE = `
.fusestream-panel {
    height: 100%; overflow-y: auto; box-sizing: border-box; padding: 14px; display: flex; flex-direction: column; gap: 10px;
    background: var(--comfy-menu-bg); color: var(--fg-color); font-size: 13px; line-height: 1.4; font-family: inherit;
}
.fusestream-panel h2 { margin: 0; font-size: 15px; font-weight: bold }
.fusestream-panel h3 { margin: 8px 0 0; font-size: 13px; font-weight: bold }
.fusestream-panel ul { margin: 0; padding: 0; list-style: none; display: flex; flex-direction: column; gap: 8px }
.fusestream-panel li { padding: 8px; border: 1px solid var(--border-color); border-radius: 6px; display: flex; flex-direction: column; gap: 4px }
.fusestream-panel strong { overflow-wrap: anywhere; font-weight: bold }
.fusestream-panel > div { display: flex; flex-wrap: wrap; gap: 6px }
.fusestream-panel p { margin: 0; overflow-wrap: anywhere }
.fusestream-panel button { align-self: flex-start; padding: 4px 12px; font: inherit }
.fusestream-panel button.fusestream-run { align-self: stretch; padding: 8px; border-radius: 6px; display: flex; flex-direction: column; gap: 4px; text-align: start }
.fusestream-panel li:has(> .fusestream-run) { padding: 0; border: none }
.fusestream-panel button:focus-visible { outline: 2px solid currentColor; outline-offset: 1px }
.fusestream-panel button:disabled { cursor: default; opacity: 1; border-style: dashed }
`
document.head.append(Object.assign(document.createElement("style"), { textContent: STYLE }))

const made = (parent, kind, text = "") => {
    const element = Object.assign(document.createElement(kind), { textContent: text })
    parent.append(element)
    return element
}

const put = (element, text) => {
    if (element.textContent !== text) element.textContent = text
}

// A server that was started again counts from 1.
const key = ({ id, name }) => `${id} ${name}`

class Panel {
    constructor(parent) {
        this.element = made(parent, "div")
        this.element.className = "fusestream-panel fusestream-buttoned"
        made(this.element, "h2", "FuseStream")
        const left = made(this.element, "p")
        this.end = onTimeLeft(told => { left.textContent = told; left.hidden = !told })
        made(this.element, "h3", words("inMemory"))
        this.models = made(this.element, "ul")
        this.items = new Map() // of each model in it
        this.none = made(this.element, "p", words("noModels"))
        this.none.hidden = true
        this.said = made(this.element, "p")
        this.said.setAttribute("role", "status")
        made(this.element, "h3", words("lastRuns"))
        this.runs = made(this.element, "ul")
        const buttons = made(this.element, "div")
        this.compare = button(buttons, words("compareWithLast"), () => {
            const [now, before] = lastTwo(this.reports)
            showPair(before, now)
        })
        this.show = button(buttons, words("sideBySide"), () => showReports(this.reports))
        made(this.element, "h3", words("thisMachine"))
        button(this.element, translatedLabel(MENU_LABEL), showDoctor)
        this.reports = []
        this.looking = undefined
        this.isUnanswered = false // said is that the server did not answer
        this.last = 0
        this.element.addEventListener("pointerenter", () => this.look()) // other buttons of the page unload models too
        this.element.addEventListener("keydown", event => event.stopPropagation()) // the canvas has shortcuts
    }

    /** Ask the server, once at a time; what changes meanwhile is asked for right after. */
    look() {
        if (this.looking) {
            this.again = true
            return this.looking
        }
        this.looking = this.#ask().finally(() => {
            this.looking = undefined
            if (this.again) this.look()
        })
        return this.looking
    }

    /** A model streams: now and then. */
    glance() {
        if (performance.now() - this.last > EVERY) this.look()
    }

    async #ask() {
        this.again = false
        this.last = performance.now()
        try {
            const [{ models }, reports] = await Promise.all([asked("/fusestream/models"), askedReports()])
            this.#showModels(models)
            this.#showRuns(reports)
            if (this.isUnanswered) this.said.textContent = ""
            this.isUnanswered = false
        } catch (error) {
            this.said.textContent = words("noAnswer", { error: error.message })
            this.isUnanswered = true
        }
    }

    /** A model keeps its elements while it is there: a button replaced between a mouse's press and its release gets no click. */
    #showModels(models) {
        const focused = document.activeElement, before = this.items
        this.items = new Map(models.map(model => [key(model), before.get(key(model)) ?? this.#item(model)]))
        for (const [gone, item] of before) if (!this.items.has(gone)) item.remove()
        models.forEach((model, i) => {
            const item = this.items.get(key(model)), there = this.models.children[i]
            if (item !== there) this.models.insertBefore(item, there ?? null)
            describe(item, model)
        })
        this.none.hidden = models.length > 0
        if (document.activeElement !== focused && this.models.contains(focused)) focused.focus() // what is moved loses it
    }

    #item(model) {
        const item = document.createElement("li")
        made(item, "strong", model.name)
        for (let line = 0; line < 2; line++) made(item, "p")
        button(item, "", () => this.#release(model), words("releaseTooltip"))
        return item
    }

    #showRuns(reports) {
        this.reports = reports
        this.runs.replaceChildren()
        for (const report of reports) {
            const one = button(made(this.runs, "li"), "", () => showOne(report), words("openRun"))
            one.className = "fusestream-run"
            made(one, "strong", report.title)
            made(one, "span", runOf(report))
            made(one, "span", [timeOf(report), report.policy].filter(Boolean).join(" · "))
        }
        if (!reports.length) made(this.runs, "p", words("noRuns"))
        this.compare.hidden = !lastTwo(reports)[1]
        this.show.hidden = !reports.length
    }

    async #release({ id, name }) {
        this.said.textContent = ""
        this.isUnanswered = false
        try {
            const answer = await api.fetchApi("/fusestream/models/release", {
                method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ id }),
            })
            const { state } = await answer.json()
            this.said.textContent = words({ released: "released", waiting: "releasedLater", gone: "releasedBefore" }[state], { name })
        } catch (error) {
            this.said.textContent = words("noAnswer", { error: error.message })
        }
        await this.look()
    }
}

/** Put a model's figures into its item. What has not changed is not written again: a selection in it stays. */
function describe(item, model) {
    const [kind, holds] = item.querySelectorAll("p"), one = item.querySelector("button")
    put(kind, words(model.streams ? "streams" : "doesNotStream", { kind: kindOf(model), device: model.device }))
    put(holds, heldBy(model))
    put(one, words(model.waiting ? "releaseWaits" : "release"))
    one.disabled = model.waiting
    one.setAttribute("aria-label", `${one.textContent} ${model.name}`)
}

const SEEN = 2 ** 20 / 20 // bytes that are not told as 0.0 MiB

/** What a model is, in words: its role, with the family that computes it or, without one, ComfyUI's class. */
function kindOf({ role, family, kind }) {
    return role ? words(`role_${role}`, { kind: family || kind }) : kind
}

/** What it holds, and of what streams what stays, what the others pass through and what RAM is kept for it: where there is any. */
function heldBy({ vram, resident, window, pinned }) {
    const parts = { blocksStay: window >= SEEN ? resident : 0, passingRoom: window, keptRam: pinned }
    const told = Object.entries(parts).filter(([, bytes]) => bytes >= SEEN).map(([key, bytes]) => words(key, { size: gib(bytes) }))
    return [words("holds", { vram: gib(vram) }), ...told].join("; ")
}

let open // the panel, while it is

app.registerExtension({
    name: "FuseStream.Panel",
    setup() {
        app.extensionManager.registerSidebarTab({
            id: "fusestream", icon: "pi pi-bolt", title: "FuseStream", tooltip: "FuseStream", type: "custom",
            label: "Fuse\u200bStream", // too long for the bar, it breaks between its words
            render(parent) {
                if (open?.element.parentElement === parent) return // the front end says so again and again
                open?.end()
                parent.style.height = "100%"
                open = new Panel(parent)
                open.look()
            },
            destroy() {
                open?.end()
                open = undefined
            },
        })
        for (const event of ["fusestream.panel", "reconnected"]) api.addEventListener(event, () => open?.look())
        for (const event of ["fusestream.meter", "executing"]) api.addEventListener(event, () => open?.glance())
    },
})
