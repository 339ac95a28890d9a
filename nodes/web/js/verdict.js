// The doctor's text in a box: its verdict as a line in the user's language, what to do below it, and the details folded. What is
// copied is all of it, in English: it is for a bug report.

import { TextBox, button } from "./text_box.js"
import { words } from "./words.js"

const VERDICT = /^FuseStream doctor: (green|amber|red)\n.*\n\n/ // its first two lines
const DETAILS = "\n\nDetails\n"
const STYLE = `
.fusestream-verdict {
    margin: 0; padding: 6px 10px; border-left: 6px solid; border-radius: 4px; background: var(--comfy-input-bg); color: var(--input-text);
    font: bold 13px/1.35 sans-serif;
}
.fusestream-verdict[hidden] { display: none }
.fusestream-verdict[data-verdict=green] { border-color: #2e9e44 }
.fusestream-verdict[data-verdict=amber] { border-color: #d98e00 }
.fusestream-verdict[data-verdict=red] { border-color: #d9363e }
`
document.head.append(Object.assign(document.createElement("style"), { textContent: STYLE }))

export class VerdictBox extends TextBox {
    #whole = ""
    #isOpen = false

    /** unfolded: called when more of the text is shown. */
    constructor(unfolded = () => {}) {
        super()
        this.line = document.createElement("p")
        this.line.className = "fusestream-verdict"
        this.line.setAttribute("role", "status")
        this.element.prepend(this.line)
        this.fold = button(this.buttons, words("details"), () => {
            this.#isOpen = !this.#isOpen
            this.#show()
            if (this.#isOpen) unfolded()
        })
        this.#show()
    }

    get text() {
        return this.#whole
    }

    set text(text) {
        this.#whole = text
        this.#show()
    }

    /** A text without a verdict, such as an error, is shown as it is. */
    #show() {
        const verdict = VERDICT.exec(this.#whole), rest = this.#whole.slice(verdict?.[0].length ?? 0)
        this.line.hidden = this.fold.hidden = !verdict
        this.area.value = verdict && !this.#isOpen ? rest.split(DETAILS)[0] : rest
        if (!verdict) return
        this.line.dataset.verdict = verdict[1]
        this.line.textContent = words(`verdict_${verdict[1]}`)
        this.fold.textContent = words(this.#isOpen ? "fewerDetails" : "details")
        this.fold.setAttribute("aria-expanded", this.#isOpen)
    }
}
