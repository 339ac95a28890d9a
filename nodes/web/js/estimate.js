// The estimate at a model's loader while the workflow is edited, before anything is queued: whether model and latent fit into what is
// free now, how long it takes, what would change it. The server reckons it (nodes/estimate_route.py) from the file's header.
//
// It is asked again when something that counts has changed, when a run has ended, and when the page is looked at again. While a prompt
// runs there is none: the meter and the steps are there then.

import { app } from "../../../scripts/app.js"
import { api } from "../../../scripts/api.js"
import { openGraph } from "./open_graph.js"
import { Overlays, box } from "./overlays.js"
import { nodeOf } from "./places.js"
import { inGib } from "./units.js"
import { words } from "./words.js"

const SETTING = "FuseStream.Estimate.Enabled"
const PATH = "/fusestream/estimate"
const LOADERS = ["FuseStreamDiffusionModelLoader", "FuseStreamCheckpointLoader"]
const QUIET = 400 // milliseconds without a change before the server is asked
const PATIENCE = 60000 // milliseconds for an answer: the first one waits for torch
const TRIES = 10 // times that it is asked again without a change, for what comes later
const MOST = 3 // samplings of one model that are shown
const LACKING = ["NOT", "TIGHT"]
const FAILING = ["noFile", "fails"] // it would not run

const estimates = new Overlays("fusestreamEstimate", fill, show, { lasts: true })

let timer
let asked = "" // what was asked last
let isAsking = false, isRunning = false
let tries = 0 // how often the same was asked again

function fill(element) {
    return { element, lines: [] }
}

/** As many lines as there are words for. */
function show({ element, lines }, { told }) {
    const wanted = told.slice(0, MOST).flatMap(one => linesOf(one, told.length > 1))
    while (lines.length < wanted.length) lines.push(box(element, "fusestream-words"))
    while (lines.length > wanted.length) lines.pop().remove()
    wanted.forEach(({ text, lacks }, i) => {
        lines[i].textContent = text
        lines[i].style.color = lacks ? "var(--lacks)" : ""
    })
}

/** What is said of one sampling, line by line. isOneOfMany: which one it is, is said too. */
function linesOf(told, isOneOfMany) {
    const name = isOneOfMany && told.sampler ? `${titleOf(told.sampler)}: ` : ""
    if (told.unknown) {
        const lacks = FAILING.includes(told.unknown)
        return [{ text: `${name}${words(lacks ? "willFail" : "noEstimate")} ${reasonOf(told)}`, lacks }]
    }
    const lacks = LACKING.includes(told.verdict), { changes } = told
    const found = [{ text: name + memoryOf(told), lacks }, { text: timeOf(told) }]
    const ram = told.ram && ramOf(told.ram)
    if (ram) found.push({ text: ram, lacks: told.ram.eachStep > 0 })
    if (told.auto) found.push({ text: `auto: ${words(`auto_${told.auto}`)}` })
    if (changes.length) found.push({ text: `${words(lacks ? "wouldFit" : "faster")} ${changes.map(changeOf).join(words("or"))}` })
    else if (told.verdict === "NOT") found.push({ text: words("nothingFits"), lacks })
    return found
}

function memoryOf({ verdict, taken, free, lacks, activations, window }) {
    const parts = [words("activations", { size: inGib(activations) })]
    if (window) parts.push(words("window", { size: inGib(window) }))
    const key = { NOT: "doesNotFit", TIGHT: "fitsBarely" }[verdict] ?? "fits"
    return `${words(key, { taken: inGib(taken), free: inGib(free), lacks: inGib(lacks) })} (${parts.join(", ")})`
}

/** What the disk has to bring again, if anything. */
function ramOf({ eachStep, eachPrompt }) {
    if (eachStep) return words("ramEachStep", { size: inGib(eachStep) })
    return eachPrompt ? words("ramEachPrompt", { size: inGib(eachPrompt) }) : ""
}

function timeOf({ step, all, steps, source, isMost }) {
    if (source === null) return words("timeUnknown")
    const most = time => (isMost ? words("atMost", { time }) : time)
    const parts = [words("aStep", { seconds: most(step) }), words("inAll", { steps, time: most(all) })]
    return [...parts, words(`source${source}`)].join(", ")
}

function changeOf({ what, values, all, isMost }) {
    const [first, second, third] = values
    const name = {
        quality: () => words("changeQuality", { quality: first }),
        "few steps": () => words("changeSteps", { steps: first }),
        frames: () => words("changeFrames", { frames: first }),
        size: () => `${second}x${first}`,
        "frames and size": () => `${words("changeFrames", { frames: first })} ${third}x${second}`,
        budget: () => "vram_budget -1",
    }[what]()
    return all === null ? name : `${name} ${isMost ? words("atMost", { time: all }) : all}`
}

const reasonOf = ({ unknown, node, values }) => words(`unknown_${unknown}`, { ...values, node: titleOf(node) })

const titleOf = id => nodeOf(id)?.getTitle() ?? id

// -------------------------------------------------------------------------------------------------------------- asking

const isOn = () => app.extensionManager.setting.get(SETTING)

/** When nothing has changed for a while. anew: even if nothing has changed at all. */
function soon(anew = false) {
    if (anew) asked = ""
    clearTimeout(timer)
    timer = setTimeout(look, QUIET)
}

function hide() {
    estimates.clear()
    asked = ""
}

async function look() {
    if (!isOn() || document.hidden || isRunning) return
    if (isAsking) return soon()
    try {
        const prompt = openGraph(app.rootGraph)
        if (!Object.values(prompt).some(node => LOADERS.includes(node.class_type))) return hide()
        const body = JSON.stringify({ prompt })
        if (body === asked) return
        asked = body
        isAsking = true
        const told = await answer(body)
        if (isOn() && !isRunning) showAll(told)
        tries = comesLater(told) && tries < TRIES ? tries + 1 : 0
        if (tries) soon(true)
    } catch (error) { // an estimate is not worth a message
        console.debug("FuseStream: no estimate", error)
        hide()
    } finally {
        isAsking = false
    }
}

async function answer(body) {
    const headers = { "Content-Type": "application/json" }
    const found = await api.fetchApi(PATH, { method: "POST", headers, body, cache: "no-store", signal: AbortSignal.timeout(PATIENCE) })
    if (!found.ok) throw new Error(`${found.status} ${found.statusText}`)
    return found.json()
}

/** Whether the server was still at another question, or at the file of another loader. */
const comesLater = ({ loaders = {} }) => Object.values(loaders).flat().some(({ unknown }) => unknown === "later")

function showAll({ loaders = {}, busy }) {
    if (busy) return hide() // it is asked again when the queue is empty
    for (const id of [...estimates.shown.keys()]) if (!loaders[id]) estimates.remove(id)
    for (const [id, told] of Object.entries(loaders)) estimates.hear(id, { told })
}

app.registerExtension({
    name: "FuseStream.Estimate",
    settings: [
        {
            id: SETTING,
            name: "Estimate at model loaders while you edit",
            tooltip: "Whether the model fits, how long the sampling takes, and what would change it, before anything is queued.",
            category: ["FuseStream", "Estimate", "Enabled"],
            type: "boolean",
            defaultValue: true,
            onChange: on => (on ? soon(true) : hide()),
        },
    ],
    setup() {
        api.addEventListener("graphChanged", () => soon())
        // A number that is typed into an element is no change to the front end before the next click.
        for (const event of ["keyup", "pointerup", "change"]) window.addEventListener(event, () => soon(), { capture: true, passive: true })
        api.addEventListener("reconnected", () => soon(true))
        api.addEventListener("status", ({ detail }) => {
            const was = isRunning
            isRunning = (detail?.exec_info?.queue_remaining ?? 0) > 0
            if (isRunning) hide()
            else if (was) soon(true)
        })
        api.addEventListener("fusestream.meter", hide) // whoever queued what streams now
        document.addEventListener("visibilitychange", () => document.hidden || soon(true))
    },
    afterConfigureGraph() {
        hide()
        soon()
    },
    refreshComboInNodes: () => soon(true), // by R: files may have come
})
