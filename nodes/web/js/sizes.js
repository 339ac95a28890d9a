// Nodes that show a picture or a text begin large enough to read it. A saved workflow's own sizes are put in after this, and stay.

import { app } from "../../../scripts/app.js"

const SIZES = { FuseStreamPlan: [540, 760], FuseStreamReport: [540, 980], FuseStreamCompare: [1080, 860], FuseStreamDoctor: [700, 320] }

app.registerExtension({
    name: "FuseStream.Sizes",
    nodeCreated(node) {
        const size = SIZES[node.comfyClass]
        if (size) node.setSize([Math.max(size[0], node.size[0]), Math.max(size[1], node.size[1])])
    },
})
