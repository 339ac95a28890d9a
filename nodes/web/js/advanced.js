// Advanced widgets of loaders where nodes are drawn on the canvas: out of sight as among elements, but for those that count. The front
// end has "Show Advanced" in a node's menu for widgets that are `advanced`; of hidden ones it keeps the rows, and the inputs beside
// them, which are taken out here. A workflow saves a node with the height of all of its rows, whether they are hidden or not.

import { app } from "../../../scripts/app.js"

const SHOW_ALL = "Comfy.Node.AlwaysShowAdvancedWidgets"
const GAP = 4 // of a row, below its widget
const AWAY = -1e5 // where no link is dropped
export const BY_PRECISION = "by precision" // the quality that leaves it to the widget `precision`

/** Hide a new node's advanced widgets, and look again when it was loaded, edited or linked. */
export function hideAdvanced(node) {
    const rows = node.widgets.filter(widget => widget.options.advanced).map(widget => new Row(node, widget))
    const row = LiteGraph.NODE_WIDGET_HEIGHT + GAP, all = row * rows.length
    const shown = () => row * rows.filter(each => each.isShown()).length
    let isLoading = false

    /** height: the node's, and how much of it is for rows; with those that are shown then, it has less or more. */
    const look = ({ height = node.size[1], has = shown(), keeps = false } = {}) => {
        for (const each of rows) each.isHidden = !each.counts() && (each.hidden || !keeps)
        if (!LiteGraph.vueNodesMode && height + shown() - has !== node.size[1]) node.setSize([node.size[0], height + shown() - has])
    }
    const edited = () => isLoading || look({ keeps: true }) // what is at hand does not go from under the pointer

    around(node, "configure", configure => {
        isLoading = true
        configure()
        isLoading = false
        look({ has: all })
    })
    around(node, "onSerialize", (serialize, saved) => {
        serialize()
        if (!LiteGraph.vueNodesMode) saved.size = [saved.size[0], saved.size[1] + all - shown()]
    })
    around(node, "toggleAdvanced", toggle => {
        const height = node.size[1], has = shown()
        toggle()
        look({ height, has })
    })
    for (const event of ["onConnectionsChange", "onWidgetChanged"]) {
        around(node, event, go => {
            go()
            edited()
        })
    }
    look()
}

/** Put a function around a method of one node. It gets the method, to be called without arguments, and what the method was told. */
function around(node, name, then) {
    const method = node[name]
    node[name] = function (...told) {
        then(() => method?.apply(this, told), ...told)
    }
}

/** A widget and its input. */
class Row {
    constructor(node, widget) {
        this.node = node
        this.widget = widget
        this.usual = node.constructor.nodeData.inputs[widget.name].default
        this.hidden = false
        let y = widget.y
        Object.defineProperty(widget, "y", {
            configurable: true, enumerable: true, get: () => (this.isShown() ? y : AWAY), set: value => { y = value },
        })
        widget.computeSize = width => [width ?? node.size[0], this.isShown() ? LiteGraph.NODE_WIDGET_HEIGHT : -GAP]
    }

    set isHidden(hidden) {
        this.widget.advanced = this.hidden = hidden
    }

    isShown() {
        return !this.hidden || Boolean(this.node.showAdvanced)
    }

    /** Whether it has another value than the usual one, is linked, or is asked for what it says. */
    counts() {
        const { node: { inputs, widgets }, widget: { name, value } } = this
        const isAsked = name === "precision" && widgets.some(each => each.name === "quality" && each.value === BY_PRECISION)
        const isLinked = inputs.some(input => input.widget?.name === name && input.link != null)
        return value !== this.usual || isLinked || isAsked || app.extensionManager.setting.get(SHOW_ALL)
    }
}
