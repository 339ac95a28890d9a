// Which node an id of the server's means. In a subgraph it is a path: `77:8` is node 8 in what node 77 stands for.

import { app } from "../../../scripts/app.js"

/** The nodes along an id, the outermost first; empty where the workflow has no such node. */
function path(id) {
    const nodes = []
    let graph = app.rootGraph ?? app.graph
    for (const part of String(id).split(":")) {
        const node = graph?.nodes.find(each => String(each.id) === part)
        if (!node) return []
        nodes.push(node)
        graph = node.subgraph
    }
    return nodes
}

/** The node itself, wherever it is. */
export const nodeOf = id => path(id).at(-1)

/** The node to draw at in the graph that is open: itself, or the one that stands for the subgraph it is in; or none. */
export function shownNode(id) {
    const open = app.canvas.graph ?? app.graph
    return path(id).find(node => node.graph === open)
}
