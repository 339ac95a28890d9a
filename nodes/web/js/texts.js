// The text of the doctor's, the plan's, the report's and the comparison's node, on the node. It begins large enough to read; a saved
// workflow's own size is put in after this, and stays.

import { app } from "../../../scripts/app.js"
import { examine } from "./doctor.js"
import { TextBox, button } from "./text_box.js"
import { VerdictBox } from "./verdict.js"
import { words } from "./words.js"

const DOCTOR = "FuseStreamDoctor"
const SIZES = { [DOCTOR]: [700, 320], FuseStreamPlan: [540, 760], FuseStreamReport: [540, 980], FuseStreamCompare: [1080, 860] }
const LEAST = { [DOCTOR]: 120, FuseStreamPlan: 120, FuseStreamReport: 120, FuseStreamCompare: 90 } // its box's height
const SHARE = 1 / 4 // of a node's height, the most that the box takes where there is a picture below it
const MARGIN = 10 // around a box on a node

const boxes = new WeakMap() // node -> its box

app.registerExtension({
    name: "FuseStream.Texts",
    nodeCreated(node) {
        const least = LEAST[node.comfyClass], size = SIZES[node.comfyClass]
        if (!least) return
        node.setSize([Math.max(size[0], node.size[0]), Math.max(size[1], node.size[1])])
        const box = node.comfyClass === DOCTOR ? new VerdictBox(() => makeRoom(node, box)) : new TextBox()
        boxes.set(node, box)
        box.area.placeholder = words("noTextYet")
        const options = { serialize: false, getMinHeight: () => least, margin: MARGIN }
        if (node.comfyClass !== DOCTOR) options.getMaxHeight = () => Math.max(least, SHARE * node.size[1])
        const widget = node.addDOMWidget("fusestream_text", "fusestream_text", box.element, options)
        widget.serialize = false // it is no input: neither a workflow nor a prompt has it
        const onExecuted = node.onExecuted
        node.onExecuted = function (output) {
            onExecuted?.call(this, output)
            showOutput(this, output)
        }
        if (node.comfyClass === DOCTOR) {
            button(box.buttons, words("examine"), one => examineInto(node, box, one), words("examineTooltip"))
        }
    },
    // A workflow is shown again that has run before.
    onNodeOutputsUpdated(outputs) {
        for (const [id, output] of Object.entries(outputs)) showOutput(located(id), output)
    },
})

/** The node that an output is kept for: `8`, or `<id of a subgraph>:8`. */
function located(id) {
    const [node, subgraph] = id.split(":").reverse()
    const graph = subgraph ? app.rootGraph.subgraphs.get(subgraph) : app.rootGraph
    return graph?.getNodeById(node)
}

function showOutput(node, output) {
    if (boxes.has(node) && output?.text?.length) show(node, boxes.get(node), output.text.join("\n"))
}

function show(node, box, text) {
    if (box.text === text) return
    box.text = text
    if (node.comfyClass === DOCTOR) makeRoom(node, box)
}

/** A higher node, if not all of the text would be in sight. A box that was not drawn yet has a size of its own: it is waited for. */
function makeRoom(node, box, frames = 60) {
    if (box.element.offsetWidth < node.size[0] - 4 * MARGIN) {
        if (frames > 0) requestAnimationFrame(() => makeRoom(node, box, frames - 1))
    } else if (box.lacking > 0) {
        node.setSize([node.size[0], node.size[1] + box.lacking])
        app.canvas.setDirty(true, true) // no graph runs that would have it drawn
    }
}

async function examineInto(node, box, one) {
    one.disabled = true
    box.text = words("examining")
    show(node, box, await examine())
    one.disabled = false
}
