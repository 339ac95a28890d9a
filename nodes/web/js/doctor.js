// The doctor without a graph: a command in the menu, which shows what it finds in a dialog.

import { app } from "../../../scripts/app.js"
import { api } from "../../../scripts/api.js"
import { openDialog } from "./dialog.js"
import { VerdictBox } from "./verdict.js"
import { words } from "./words.js"

const COMMAND = "FuseStream.Doctor"
export const MENU_LABEL = "Examine this machine (Doctor)"

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

/** The doctor in a dialog. */
export async function showDoctor() {
    const box = new VerdictBox()
    box.text = words("examining")
    openDialog("FuseStream Doctor", box.element, box.buttons)
    box.text = await examine()
}

app.registerExtension({
    name: "FuseStream.Doctor",
    commands: [
        {
            id: COMMAND, label: "FuseStream Doctor: examine this machine", menubarLabel: MENU_LABEL, icon: "pi pi-heart",
            function: showDoctor,
        },
    ],
    menuCommands: [{ path: ["FuseStream"], commands: [COMMAND] }],
})
