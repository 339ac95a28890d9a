// A dialog over the page, which the browser keeps the keyboard in and closes with Escape.

import { button } from "./text_box.js"
import { words } from "./words.js"

const STYLE = `
.fusestream-dialog {
    width: min(860px, 92vw); height: min(900px, 88vh); padding: 16px; flex-direction: column; gap: 10px; margin: auto;
    border: 1px solid var(--border-color); border-radius: 8px; background: var(--comfy-menu-bg); color: var(--fg-color);
    font: 14px sans-serif;
}
.fusestream-dialog[open] { display: flex }
.fusestream-dialog::backdrop { background: rgb(0 0 0 / 50%) }
.fusestream-dialog .fusestream-text { flex: 1 }
.fusestream-dialog h2 { margin: 0; font-size: 16px }
`
document.head.append(Object.assign(document.createElement("style"), { textContent: STYLE }))

/** Opens one. buttons: the element that has the one to close it, of its own or of a part of it. */
export function openDialog(title, content, buttons) {
    const dialog = document.createElement("dialog"), heading = document.createElement("h2")
    dialog.className = "fusestream-dialog"
    heading.textContent = title
    dialog.append(heading, content)
    if (!content.contains(buttons)) dialog.append(buttons)
    button(buttons, words("close"), () => dialog.close())
    dialog.addEventListener("close", () => dialog.remove())
    dialog.addEventListener("keydown", event => event.stopPropagation()) // the canvas behind it has shortcuts
    document.body.append(dialog)
    dialog.showModal()
    return dialog
}
