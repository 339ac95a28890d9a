// Our templates in ComfyUI's template browser. Of a pack's templates it knows the names of their files, in the order of the file
// system. ComfyUI's own come from an index, with titles, tags, models and sizes, by which they are found and sorted: ours have one
// too, and are told along with those, as the pack's. Where that fails, they are there by the names of their files.
//
// And what they load: a picture or a clip of ours that a workflow names is put into the input folder, if none is there, before the
// front end looks for it.

import { app } from "../../../scripts/app.js"
import { api } from "../../../scripts/api.js"

const PACK = decodeURIComponent(new URL(import.meta.url).pathname.split("/extensions/")[1].split("/")[0])
const INDEX = new URL("../templates/index.json", import.meta.url)
const INPUT = /^fusestream_example\w*\.(jpg|mp4)$/
const LOADERS = ["LoadImage", "LoadImageMask", "LoadVideo"]

let described = [] // the categories of our index, of those templates that are there

async function indexOf(names) {
    const index = await (await fetch(INDEX)).json()
    const listed = new Set(names)
    for (const category of index) {
        category.moduleName = PACK
        category.templates = category.templates.filter(({ name }) => listed.has(name))
    }
    return index
}

// The front end asks for the names first, then for ComfyUI's index, and again for this when the language changes.
const { getWorkflowTemplates, getCoreWorkflowTemplates } = api
api.getWorkflowTemplates = async function (...args) {
    const names = await getWorkflowTemplates.apply(this, args)
    if (!names[PACK]) return names
    try {
        described = await indexOf(names[PACK])
    } catch (error) {
        console.warn("FuseStream: its templates have no titles:", error)
        return names
    }
    const told = new Set(described.flatMap(({ templates }) => templates.map(({ name }) => name)))
    const { [PACK]: ours, ...others } = names
    const untold = ours.filter(name => !told.has(name))
    return untold.length ? { ...others, [PACK]: untold } : others
}
api.getCoreWorkflowTemplates = async function (...args) {
    return [...await getCoreWorkflowTemplates.apply(this, args), ...described]
}

function inputsOf({ nodes = [], definitions }) {
    const all = [nodes, ...(definitions?.subgraphs ?? []).map(graph => graph.nodes)].flat()
    const values = all.filter(({ type }) => LOADERS.includes(type)).flatMap(({ widgets_values }) => Object.values(widgets_values ?? []))
    return new Set(values.filter(value => typeof value === "string" && INPUT.test(value)))
}

async function put(name) {
    const answer = await api.fetchApi(`/fusestream/example_inputs/${name}`, { method: "POST" })
    return answer.ok && (await answer.json()).is_new
}

app.registerExtension({
    name: "FuseStream.Templates",
    async beforeConfigureGraph(workflow) {
        const areNew = await Promise.all([...inputsOf(workflow)].map(put))
        if (areNew.some(Boolean)) await app.reloadNodeDefs() // the loaders' lists know it now
    },
})
