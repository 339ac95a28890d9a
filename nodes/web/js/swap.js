// A workflow as it is saved, with other loaders in the place of its own: ComfyUI's and the GGUF pack's, and FuseStream's. Only what
// is saved of these nodes is rewritten, so that all else about them stays: place, size, colour, group, mode, links.

import { app } from "../../../scripts/app.js"
import { makeRoom } from "./room.js"

const DIFFUSION = "FuseStreamDiffusionModelLoader", TEXT = "FuseStreamTextEncoderLoader", VAE = "FuseStreamVAELoader"
const WHOLE = "FuseStreamCheckpointLoader"

// Whose place ours take. widgets: in their order, with the names they have in ours; a value, where ours only has this one.
const PLACES = [
    { theirs: "UNETLoader", ours: DIFFUSION, widgets: { unet_name: "model_name", weight_dtype: { only: "default" } } },
    { theirs: "UnetLoaderGGUF", ours: DIFFUSION, widgets: { unet_name: "model_name" } },
    { theirs: "CLIPLoader", ours: TEXT, widgets: { clip_name: "text_encoder_name", type: "type", device: { only: "default" } } },
    { theirs: "CLIPLoaderGGUF", ours: TEXT, widgets: { clip_name: "text_encoder_name", type: "type" } },
    {
        theirs: "DualCLIPLoader", ours: TEXT,
        widgets: { clip_name1: "text_encoder_name", clip_name2: "second_file", type: "type", device: { only: "default" } },
    },
    {
        theirs: "DualCLIPLoaderGGUF", ours: TEXT,
        widgets: { clip_name1: "text_encoder_name", clip_name2: "second_file", type: "type" },
    },
    {
        theirs: "LTXAVTextEncoderLoader", ours: TEXT,
        widgets: { text_encoder: "text_encoder_name", ckpt_name: "second_file", device: { only: "default" } },
    },
    {
        theirs: "TripleCLIPLoader", ours: TEXT,
        widgets: { clip_name1: "text_encoder_name", clip_name2: "second_file", clip_name3: "third_file" },
    },
    {
        theirs: "QuadrupleCLIPLoader", ours: TEXT,
        widgets: {
            clip_name1: "text_encoder_name", clip_name2: "second_file", clip_name3: "third_file", clip_name4: "fourth_file",
        },
    },
    { theirs: "VAELoader", ours: VAE, widgets: { vae_name: "vae_name" } },
    { theirs: "CheckpointLoaderSimple", ours: WHOLE, widgets: { ckpt_name: "ckpt_name" } },
]
// Our widgets that a loader of theirs may lack while they have this value.
const FURTHER = ["second_file", "third_file", "fourth_file"], NONE = "none"
// The heights of a widget and of a further output where nodes are elements; besides, they have a row for an output and one for their pack.
const ROW = 28, SLOT = 20
const LOADED = new Set(["MODEL", "CLIP", "VAE"])
// What a node's properties tell of its type and of the pack it comes from.
const OF_TYPE = ["Node name for S&R", "cnr_id", "aux_id", "ver"]

const known = type => LiteGraph.registered_node_types[type]
const titleOf = type => known(type)?.title ?? type

/** Rewrites a workflow. Returns how many loaders it swapped, and of those that stay why, as a key and values for `words`. */
export function swap(workflow, toOurs) {
    let count = 0
    const stays = [], all = [...graphs(workflow)], subgraphs = new Set(all.map(graph => graph.id))
    for (const graph of all) {
        const heights = new Map()
        graph.nodes.forEach((node, i) => {
            const ways = PLACES.filter(each => node.type === (toOurs ? each.theirs : each.ours))
            const found = ways.map(way => attempt(node, way, toOurs))
            const taken = found.find(one => one.node)
            if (taken) {
                graph.nodes[i] = taken.node
                relink(graph, node, taken.node, taken.names)
                if (graph === workflow) rename(workflow, node.id, taken.names)
                heights.set(taken.node, taken.height)
            } else if (found.length) {
                stays.push({ ...found[0].reason, values: { title: node.title ?? titleOf(node.type), ...found[0].reason.values } })
            } else if (toOurs && loads(node) && !subgraphs.has(node.type)) {
                stays.push({ key: "noPlace", values: { title: node.title ?? titleOf(node.type) } })
            }
        })
        makeRoom(graph, heights)
        count += heights.size
    }
    return { count, stays }
}

/** The workflow itself and the subgraphs that are defined in it. */
function* graphs(graph) {
    yield graph
    for (const subgraph of graph.definitions?.subgraphs ?? []) yield* graphs(subgraph)
}

/** Whether a node makes a model out of nothing but its widgets, by a type that is none of ours. */
function loads({ type, inputs = [], outputs = [] }) {
    const isLoader = outputs.some(output => LOADED.has(output.type)) && inputs.every(input => input.widget)
    return isLoader && known(type) && !PLACES.some(place => place.ours === type)
}

/** The node in another type with the names that its widgets have there and its least height, or the reason why not. */
function attempt(node, { theirs, ours, widgets }, toOurs) {
    const type = toOurs ? ours : theirs
    const refused = (key, values) => ({ reason: { key, values: { loader: titleOf(type), ...values } } })
    if (!known(type)) return refused("notThere", {})
    const before = known(node.type) && LiteGraph.createNode(node.type), after = LiteGraph.createNode(type)
    const values = valuesOf(node, before, Object.keys(widgets))
    const linked = new Set((node.inputs ?? []).filter(input => input.link != null).map(input => input.widget?.name ?? input.name))
    const names = {}
    for (const [their, our] of Object.entries(widgets)) {
        if (our.only === undefined) Object.assign(names, toOurs ? { [their]: our } : { [our]: their })
        else if (toOurs && !linked.has(their) && ![undefined, our.only].includes(values[their])) {
            return refused("notOffered", { widget: their, value: values[their] })
        }
    }
    const lost = toOurs ? undefined : FURTHER.find(name => !names[name] && ![undefined, NONE].includes(values[name]))
    if (lost) return refused("notOffered", { widget: lost, value: values[lost] })
    for (const widget of linked) if (!names[widget]) return refused("noInput", { widget })
    for (const [name, renamed] of Object.entries(names)) {
        const value = values[name], there = after.widgets.find(widget => widget.name === renamed)
        // What neither offers is a file that is missing: either loader says so.
        if (!linked.has(name) && offers(before, name, value) && !offers(after, renamed, value)) {
            return refused("notOffered", { widget: name, value })
        }
        if (value !== undefined) there.value = value
    }
    const saved = after.serialize() // on the canvas as high as it is with its advanced widgets
    // An element is at least as high as the node is on the canvas.
    const height = LiteGraph.vueNodesMode ? Math.max(after.computeSize()[1], elementsHeight(after)) : saved.size[1]
    return { node: rewritten(node, saved), names, height }
}

/** How high a node is where nodes are elements: its advanced widgets have one row together, a button. */
function elementsHeight({ widgets, outputs }) {
    const all = app.extensionManager.setting.get("Comfy.Node.AlwaysShowAdvancedWidgets")
    const advanced = all ? 0 : widgets.filter(widget => widget.options?.advanced).length
    return ROW * (widgets.length - advanced + (advanced ? 1 : 0) + 2) + SLOT * (outputs.length - 1)
}

/** A saved node's values by their widgets' names. order: of a type that is not installed. */
function valuesOf(node, before, order) {
    const names = before ? before.widgets.filter(widget => widget.serialize !== false).map(widget => widget.name) : order
    return Object.fromEntries(names.map((name, i) => [name, node.widgets_values?.[i]]))
}

/** Whether a type's widget has this among its choices; a type that is not installed is believed. */
function offers(node, name, value) {
    const choices = node ? node.widgets.find(widget => widget.name === name).options.values : [value]
    return !Array.isArray(choices) || choices.includes(value)
}

/** A saved node with what its type says of it from another one, without links into it. */
function rewritten(node, { type, inputs, outputs, properties, widgets_values }) {
    const kept = Object.fromEntries(Object.entries(node.properties ?? {}).filter(([name]) => !OF_TYPE.includes(name)))
    // A title that is only the type's name was not given by the user.
    const { title, ...rest } = node
    if (title && title !== titleOf(node.type) && title !== known(node.type)?.nodeData.display_name) rest.title = title
    const same = outputs.map(({ name, localized_name }, i) => ({ ...node.outputs[i], name, localized_name }))
    return { ...rest, type, inputs, outputs: same, properties: { ...kept, ...properties }, widgets_values }
}

/** Lead the links into a node to the inputs of the one in its place. */
function relink(graph, node, taken, names) {
    const links = new Map([...(graph.links ?? []), ...(graph.floatingLinks ?? [])].map(link => [Array.isArray(link) ? link[0] : link.id, link]))
    for (const input of node.inputs ?? []) {
        const place = taken.inputs.findIndex(({ name }) => name === names[input.widget?.name ?? input.name])
        if (place < 0) continue
        const { link, label } = input
        Object.assign(taken.inputs[place], { link, ...(label && { label }) })
        if (Array.isArray(links.get(link))) links.get(link)[4] = place
        else if (links.has(link)) links.get(link).target_slot = place
    }
}

/** What the app mode shows of a node, by its widgets' new names. An entry begins with a node's number, or a widget's own id. */
function rename(workflow, id, names) {
    for (const entry of workflow.extra?.linearData?.inputs ?? []) {
        const [of, name] = entry, widget = `${workflow.id}:${id}:`
        if (!names[name]) continue
        if (of === `${widget}${name}`) entry.splice(0, 2, `${widget}${names[name]}`, names[name])
        else if (String(of) === String(id)) entry[1] = names[name]
    }
}
