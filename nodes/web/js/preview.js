// The moving preview of a video (nodes/page/moving_preview.py) on a sampler that is drawn on the canvas. It comes as ComfyUI's own preview,
// an animated WebP: where nodes are elements the browser plays it, but a canvas has only its first frame. There the sampler shows it
// as the front end shows finished pictures that move, in an element at the node.

import { app } from "../../../scripts/app.js"
import { api } from "../../../scripts/api.js"
import { nodeOf } from "./places.js"

const SETTING = "FuseStream.Preview.Moving"
const WEBP = [[0, "RIFF"], [8, "WEBP"]] // where a file of this kind has which letters
const ELEMENT = "$$comfy_animation_preview", LEAST_HEIGHT = "--comfy-widget-min-height" // the front end's names
const HEIGHT = "220" // as it gives to previews that stand still

/** Any other preview comes as JPEG or PNG. */
async function moves(blob) {
    const letters = String.fromCharCode(...new Uint8Array(await blob.slice(0, 12).arrayBuffer()))
    return WEBP.every(([at, word]) => letters.startsWith(word, at))
}

/** The front end takes a preview for one that stands still whenever a new one comes. Here it cannot. It asks at each drawing. */
function play(node) {
    node.widgets ??= [] // a sampler that has none shows nothing in an element
    Object.defineProperty(node, "animatedImages", { configurable: true, get: () => { makeRoom(node); return true }, set() {} })
}

function makeRoom(node) {
    const style = node.widgets.find(each => each.name === ELEMENT)?.element.style
    if (!style || style.getPropertyValue(LEAST_HEIGHT)) return
    style.setProperty(LEAST_HEIGHT, HEIGHT)
    node.graph?.setDirtyCanvas(true, true)
}

function stop(node) {
    if (Object.getOwnPropertyDescriptor(node, "animatedImages")?.get) delete node.animatedImages
}

app.registerExtension({
    name: "FuseStream.Preview",
    settings: [
        {
            id: SETTING,
            name: "Previews of videos move",
            tooltip: "While a model of a FuseStream loader samples a video: all of its frames, where ComfyUI shows the first, and also where its Live preview method is left at default. Choose none there for no preview. Holds from the next run on.",
            category: ["FuseStream", "Preview", "Moving"],
            type: "boolean",
            defaultValue: true,
        },
    ],
    setup() {
        api.addEventListener("b_preview_with_metadata", async ({ detail }) => {
            const isMoving = await moves(detail.blob), node = nodeOf(detail.displayNodeId)
            if (!node) return
            // In a subgraph that is closed the node that stands for it draws the picture.
            const isOpen = node.graph === (app.canvas.graph ?? app.graph)
            if (isMoving && isOpen && !LiteGraph.vueNodesMode) play(node)
            else stop(node)
            node.graph.setDirtyCanvas(true)
        })
    },
})
