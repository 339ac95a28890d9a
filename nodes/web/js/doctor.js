// The doctor without a graph: a command in the menu, which shows what it finds in a dialog.

import { app } from "../../../scripts/app.js"
import { api } from "../../../scripts/api.js"
import { TextBox, button } from "./text_box.js"
import { words } from "./words.js"

const COMMAND = "FuseStream.Doctor"
const MENU_LABEL = "Examine this machine (Doctor)"
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

/** What the server's doctor says, or why it says nothing. */
export async function examine() {
    try {
        const answer = await api.fetchApi("/fusestream/doctor", { cache: "no-store" })
        const text = await answer.text()
        return answer.ok || answer.status === 500 ? text : words("noAnswer", { error: `${answer.status} ${answer.statusText}` })
    } catch (error) {
        return words("noAnswer", { error: error.message })
    }
}

async function showDialog() {
    const dialog = document.createElement("dialog"), box = new TextBox(), title = document.createElement("h2")
    dialog.className = "fusestream-dialog"
    title.textContent = "FuseStream Doctor"
    dialog.append(title, box.element)
    button(box.buttons, words("close"), () => dialog.close())
    dialog.addEventListener("close", () => dialog.remove())
    dialog.addEventListener("keydown", event => event.stopPropagation()) // the canvas behind it has shortcuts
    document.body.append(dialog)
    box.text = words("examining")
    dialog.showModal()
    box.text = await examine()
}

app.registerExtension({
    name: "FuseStream.Doctor",
    commands: [
        {
            id: COMMAND, label: "FuseStream Doctor: examine this machine", menubarLabel: MENU_LABEL, icon: "pi pi-heart",
            function: showDialog,
        },
    ],
    menuCommands: [{ path: ["FuseStream"], commands: [COMMAND] }],
})
