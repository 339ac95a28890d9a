// The workflow that is open as the server takes one: a table of nodes, subgraphs laid open, with where each input comes from. It is
// only read. Queueing asks widgets for their values, and some act then (a camera takes its picture); here they are not asked, and of
// texts only those of our own nodes are told, names of model files, and what sizes and numbers follow from.

const NEVER = 2, BYPASS = 4 // LiteGraph's modes
const SUBGRAPH_INPUTS = "-10" // LiteGraph's id of what stands for a subgraph's inputs within it: a number, later a text
const OURS = "FuseStream"
const MODEL_FILE = /^[^\n]{1,250}\.(safetensors|gguf|sft|ckpt|pt|pth|bin)$/i // as nodes/model_files.py knows them
// Nodes whose texts decide numbers and sizes: `TEXTS` of nodes/graph/values.py.
const COMPUTES = [
    "ComfyMathExpression", "CustomCombo", "ImageScale", "ImageScaleBy", "ImageScaleToMaxDimension", "ImageScaleToTotalPixels",
    "ImageStitch", "LoadImage", "LoadVideo", "ResizeImageMaskNode", "ResolutionSelector",
]
const DEEP = 200 // links that are followed: more go round in a circle

/** In API form, with numbers, switches, links and names of model files; of our nodes, and of those in `COMPUTES`, texts too. */
export function openGraph(root) {
    const prompt = {}
    for (const [node, path] of nodesIn(root, [])) {
        const inputs = {}
        for (const { name, value, options } of node.widgets ?? []) {
            if (name && options?.serialize !== false) keep(inputs, name, value, node)
        }
        node.inputs?.forEach(({ name }, i) => {
            const from = into(node, i, path, 0)
            if (from?.id) inputs[name] = [from.id, from.slot]
            else if (from) keep(inputs, name, from.value, node)
        })
        prompt[idOf(node, path)] = { class_type: node.comfyClass ?? node.type, inputs }
    }
    return prompt
}

const idOf = (node, path) => [...path, node].map(each => each.id).join(":")

function keep(inputs, name, value, node) {
    const kind = node.comfyClass ?? ""
    const isTold = typeof value === "string" && (kind.startsWith(OURS) || COMPUTES.includes(kind) || MODEL_FILE.test(value))
    if (isTold || typeof value === "number" || typeof value === "boolean") inputs[name] = value
}

/** What would run, each with the nodes that stand for the subgraphs it is in. */
function* nodesIn(graph, path) {
    for (const node of graph.nodes) {
        if (node.mode === NEVER || node.mode === BYPASS || path.length > DEEP) continue
        if (node.subgraph) yield* nodesIn(node.subgraph, [...path, node])
        else if (!node.isVirtualNode) yield [node, path]
    }
}

const isInput = link => String(link.origin_id) === SUBGRAPH_INPUTS

/** The link into an input. What stands for a subgraph tells by `getInputLink` what leaves the subgraph, and a virtual node what it
 * passes on. */
function linkInto(node, i) {
    return node.subgraph ? node.graph.getLink(node.inputs[i]?.link) : node.getInputLink?.(i)
}

/** What comes into an input by its link: of a node by its id and slot, or a value; nothing where nothing comes. */
function into(node, i, path, depth) {
    const link = depth < DEEP && linkInto(node, i)
    if (!link) return
    if (!isInput(link)) return outOf(node.graph.getNodeById(link.origin_id), link.origin_slot, path, depth + 1)
    const outer = path.at(-1), input = outer?.inputs[link.origin_slot]
    if (input?.link != null) return into(outer, link.origin_slot, path.slice(0, -1), depth + 1)
    const widget = input && (outer.getWidgetFromSlot?.(input) ?? outer.widgets?.find(each => each.name === input.widget?.name))
    return widget && { value: widget.value }
}

/** What comes out of a node's output, through what only passes it on. */
function outOf(node, slot, path, depth) {
    if (!node || depth > DEEP || node.mode === NEVER) return
    if (node.mode === BYPASS) {
        const i = passes(node, slot)
        return i < 0 ? undefined : into(node, i, path, depth + 1)
    }
    if (node.subgraph) {
        const link = node.resolveSubgraphOutputLink(slot)?.link
        if (!link) return
        if (isInput(link)) return into(node, link.origin_slot, path, depth + 1)
        return outOf(node.subgraph.getNodeById(link.origin_id), link.origin_slot, [...path, node], depth + 1)
    }
    if (!node.isVirtualNode) return { id: idOf(node, path), slot }
    const other = node.resolveVirtualOutput?.(slot)
    if (other) {
        const outer = pathTo(other.node.graph, node, path)
        return outer && outOf(other.node, other.slot, outer, depth + 1)
    }
    return into(node, slot, path, depth + 1) ?? (node.widgets?.length ? { value: node.widgets[0].value } : undefined)
}

/** The path of a graph that this node is in, or that is around it; nothing of another one. */
function pathTo(graph, node, path) {
    const around = [...path.map(each => each.graph), node.graph], depth = around.lastIndexOf(graph)
    return depth < 0 ? undefined : path.slice(0, depth)
}

/** The input whose value a bypassed node hands out: the one across from the output, else the first of its type. */
function passes({ inputs = [], outputs }, slot) {
    const { type } = outputs[slot], fits = input => input && (input.type === type || input.type === "*" || type === "*")
    return fits(inputs[slot]) ? slot : inputs.findIndex(fits)
}
