// What takes time beside a node's own work, below the node that runs: kernels that are measured, once, in a sampler's first step.
// The server says how far it is, ten times a second at most (nodes/activity.py).

import { app } from "../../../scripts/app.js"
import { api } from "../../../scripts/api.js"
import { Overlays, bar, line } from "./overlays.js"
import { words } from "./words.js"

const activities = new Overlays(
    "fusestreamActivity",
    element => ({ say: line(element), done: bar(element, "now") }),
    ({ say, done }, told) => {
        say([words("measuring", { op: told.measuring })])
        done.style.width = `${Math.min(100, (100 * told.done) / Math.max(1, told.of))}%`
    },
)

app.registerExtension({
    name: "FuseStream.Activity",
    setup() {
        api.addEventListener("fusestream.activity", ({ detail }) => activities.hear(String(detail.node), detail))
    },
})
