// What was said last on a node stays there when the run is over. The front end draws ComfyUI's progress text; 1.58 takes it away when a
// job ends, and here it is put back, if the workflow that was open then is open still.

import { app } from "../../../scripts/app.js"
import { api } from "../../../scripts/api.js"

const SAID = "fusestream.words"
const ENDS = ["execution_success", "execution_error", "execution_interrupted"]

const last = new Map() // node id -> { words, workflow }

const workflow = () => app.extensionManager.workflow?.activeWorkflow

function putBack() {
    for (const [nodeId, { words: text, workflow: then }] of last) {
        if (then === workflow()) api.dispatchCustomEvent("progress_text", { nodeId, text })
    }
    last.clear()
}

app.registerExtension({
    name: "FuseStream.LastWords",
    setup() {
        api.addEventListener(SAID, ({ detail: { node, words } }) => last.set(node, { words, workflow: workflow() }))
        for (const end of ENDS) api.addEventListener(end, () => setTimeout(putBack)) // after the front end's own answer to it
    },
})
