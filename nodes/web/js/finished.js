// A finished run can be compared with the last one of the same model: at its loader there is what its sampling took then and now, and
// a button to see both. It goes after a minute, when it is closed, when something is run again, and when another workflow is opened.

import { app } from "../../../scripts/app.js"
import { api } from "../../../scripts/api.js"
import { Overlays, line } from "./overlays.js"
import { askedReports, lastTwo, showPair } from "./reports.js"
import { button } from "./text_box.js"
import { words } from "./words.js"

const STAYS = 60000 // milliseconds
const offers = new Overlays("fusestreamFinished", fill, show, { lasts: true })

let loader // that said last how it goes, in the run of this page
let timer
let newest = 0 // number of the newest report that has been seen

function fill(element) {
    const say = line(element), buttons = document.createElement("div")
    buttons.className = "fusestream-buttons"
    buttons.style.marginTop = "4px"
    element.append(buttons)
    return { say, buttons }
}

function show({ say, buttons }, { id, now, before }) {
    say([words("sampledIn", { time: now.run.all }), words("lastTime", { time: before.run.all })])
    buttons.replaceChildren()
    button(buttons, words("compareWithLast"), () => showPair(before, now))
    button(buttons, words("close"), () => offers.remove(id))
}

/** The newest report and the one before of the same model, if the newest is of the run that has just ended. */
async function offer(id) {
    const [now, before] = lastTwo(await askedReports())
    if (now && now.id !== newest && before?.run && now.run) {
        offers.hear(id, { id, now, before })
        clearTimeout(timer)
        timer = setTimeout(() => offers.clear(), STAYS)
    }
    newest = now?.id ?? 0
}

app.registerExtension({
    name: "FuseStream.Finished",
    setup() {
        api.addEventListener("fusestream.left", ({ detail }) => { loader = String(detail.node) })
        // The server keeps a run's report after ComfyUI has said that it is over, and then says so.
        api.addEventListener("fusestream.panel", () => {
            const id = loader
            loader = undefined
            if (id) offer(id).catch(error => console.debug("FuseStream: no comparison", error)) // it is not worth a message
        })
        api.addEventListener("promptQueueing", () => offers.clear())
        api.addEventListener("execution_start", () => { loader = undefined }) // the one before was interrupted
    },
    beforeConfigureGraph: () => offers.clear(),
})
