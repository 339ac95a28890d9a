// What was said last on a node stays there when the run is over. The front end draws ComfyUI's progress text; 1.58 takes it away when a
// job ends, and here it is put back, if the workflow that was open then is open still. A node grows for it, and is saved as high as it
// was before: words are not saved, and would leave a gap.

import { app } from "../../../scripts/app.js"
import { api } from "../../../scripts/api.js"
import { nodeOf } from "./places.js"

const SAID = "fusestream.words"
const ENDS = ["execution_success", "execution_error", "execution_interrupted"]

const WIDGET = "$$node-text-preview" // the front end's name of it

const last = new Map() // node id -> { words, workflow }
const without = new WeakMap() // node -> its height without words
let held = [] // nodes with words, and their heights, when a pointer was pressed

const workflow = () => app.extensionManager.workflow?.activeWorkflow

function putBack() {
    for (const [nodeId, { words: text, workflow: then }] of last) {
        if (then === workflow()) api.dispatchCustomEvent("progress_text", { nodeId, text })
    }
    last.clear()
}

const hasWords = node => node.widgets?.some(widget => widget.name === WIDGET)

/** Remember how high a node is before words come to it. */
function remember(node) {
    if (!node || hasWords(node)) return
    if (!without.has(node)) {
        const { onSerialize } = node
        node.onSerialize = function (saved) {
            if (hasWords(this)) saved.size = [saved.size[0], saved.size[1] + without.get(this) - this.size[1]]
            onSerialize?.call(this, saved)
        }
    }
    without.set(node, node.size[1])
}

/** What a user drags a node's height by counts without words too. */
function follow(event) {
    if (event.type === "pointerdown") {
        held = (app.canvas?.graph?.nodes ?? []).filter(node => without.has(node) && hasWords(node)).map(node => [node, node.size[1]])
    } else {
        for (const [node, height] of held) without.set(node, without.get(node) + node.size[1] - height)
        held = []
    }
}

app.registerExtension({
    name: "FuseStream.LastWords",
    setup() {
        api.addEventListener(SAID, ({ detail: { node, words } }) => {
            remember(nodeOf(node))
            last.set(node, { words, workflow: workflow() })
        })
        for (const event of ["pointerdown", "pointerup"]) document.addEventListener(event, follow, true)
        for (const end of ENDS) api.addEventListener(end, () => setTimeout(putBack)) // after the front end's own answer to it
    },
})
