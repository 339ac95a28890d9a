// A text as it is, with its line breaks and a button that copies it: on nodes and in the doctor's dialog. The front end's own box
// for a node's text reads it as Markdown where nodes are elements, and there lines run into each other.

import { words } from "./words.js"

const SHOWN = 1500 // milliseconds for which a button says what it did
const STYLE = `
.fusestream-text { display: flex; flex-direction: column; gap: 4px; min-height: 0; pointer-events: auto }
.fusestream-text textarea {
    flex: 1; min-height: 0; resize: none; box-sizing: border-box; width: 100%; padding: 6px; border: 1px solid var(--border-color);
    border-radius: 4px; background: var(--comfy-input-bg); color: var(--input-text); font: 11px/1.35 monospace;
    white-space: pre-wrap; overflow-wrap: anywhere;
}
.fusestream-buttons { display: flex; gap: 4px; justify-content: flex-end }
:is(.fusestream-buttons, .fusestream-buttoned) button {
    padding: 2px 10px; border: 1px solid var(--border-color); border-radius: 4px; background: var(--comfy-input-bg);
    color: var(--input-text); font: 12px sans-serif; cursor: pointer;
}
:is(.fusestream-buttons, .fusestream-buttoned) button:hover { border-color: currentColor }
`
document.head.append(Object.assign(document.createElement("style"), { textContent: STYLE }))

export function button(parent, label, press, tooltip = "") {
    const one = Object.assign(document.createElement("button"), { type: "button", textContent: label, title: tooltip })
    one.addEventListener("click", () => press(one))
    parent.append(one)
    return one
}

export class TextBox {
    constructor() {
        this.element = document.createElement("div")
        this.element.className = "fusestream-text"
        this.area = Object.assign(document.createElement("textarea"), { readOnly: true, spellcheck: false })
        this.area.dataset.captureWheel = "true" // the wheel scrolls the text, not the canvas
        this.buttons = document.createElement("div")
        this.buttons.className = "fusestream-buttons"
        this.element.append(this.area, this.buttons)
        button(this.buttons, words("copy"), one => this.#copy(one))
    }

    get text() {
        return this.area.value
    }

    set text(text) {
        this.area.value = text
    }

    /** How much higher it has to be to show all of its text. */
    get lacking() {
        return this.area.scrollHeight - this.area.clientHeight
    }

    async #copy(one) {
        const done = await copied(this.text, this.area)
        one.textContent = words(done ? "copied" : "notCopied")
        setTimeout(() => { one.textContent = words("copy") }, SHOWN)
    }
}

/** Whether a text went into the clipboard. A page from another machine without https has no `navigator.clipboard`: there it is
 * copied out of this area, which may show a part of it. */
async function copied(text, area) {
    try {
        await navigator.clipboard.writeText(text)
        return true
    } catch {
        const shown = area.value
        area.value = text
        area.select()
        const done = document.execCommand("copy")
        if (shown !== text) area.value = shown
        return done
    }
}
