// The words of the pack's own parts of the page, in the user's language. English is here; locales/<language>/main.json
// has the others, which the server hands out together with all packs' translations of nodes.

import { app } from "../../../scripts/app.js"
import { api } from "../../../scripts/api.js"

const ENGLISH = {
    held: "{memory} {held} of {limit}",
    waiting: "{percent}% waiting",
    copy: "Copy",
    copied: "Copied",
    notCopied: "Select the text and press Ctrl+C: the browser did not allow it",
    close: "Close",
    noTextYet: "The text comes here when this node has run.",
    examine: "Look now",
    examineTooltip: "Examines this machine without running the graph.",
    details: "Details",
    fewerDetails: "Fewer details",
    verdict_green: "Green: FuseStream works here, and there is nothing to do.",
    verdict_amber: "Amber: FuseStream works here, but something costs speed, or may fail with some models.",
    verdict_red: "Red: FuseStream cannot work here. What is in its way comes first.",
    examining: "Looking at this machine: some seconds...",
    noAnswer: "ComfyUI's server did not answer: {error}. Is it still running?",
    swapped: "Swapped: {count}. Undo takes it back.",
    noneOfTheirs: "Nothing to swap: this workflow has no Load Diffusion Model, Load CLIP, Load VAE, nor those for GGUF files.",
    noneOfOurs: "Nothing to swap: this workflow has no FuseStream loader.",
    noPlace: "{title} stays: FuseStream has no loader in its place.",
    notThere: "{title} stays: {loader} is not installed.",
    notOffered: "{title} stays: {loader} has no choice like its {widget}, {value}.",
    noInput: "{title} stays: its {widget} comes by a link, and {loader} has no such input.",
    inMemory: "Models in memory",
    noModels: "No model is in memory.",
    streams: "{kind}, streams on {device}",
    doesNotStream: "{kind}, on {device}",
    holds: "Holds {vram}",
    ofThese: "Blocks that stay {resident}, window {window}; pinned RAM {pinned}",
    release: "Release",
    releaseWaits: "Released after this run",
    releaseTooltip: "Unloads it, as ComfyUI does when another model needs the memory. A run that uses it loads it again.",
    released: "{name} was released.",
    releasedLater: "A run is under way: {name} is released when it is done.",
    releasedBefore: "{name} was not in memory any more.",
    lastRuns: "Last runs",
    noRuns: "A report of each run of a streamed model comes here.",
    aPass: "{seconds} a pass, {percent}% of it waiting",
    sideBySide: "Show side by side",
    compareWithLast: "Compare with last",
    aPassNow: "A pass: {seconds}",
    aPassBefore: "last time {seconds}",
    timeLeft: "{time} left",
    thisMachine: "This machine",
    useCamera: "Use the camera",
    stopCamera: "Stop the camera",
    cameraTooltip: "Its frames go to this node, where neither frames nor video is connected. Stopping it ends a run with what was made.",
    cameraInsecure: "The browser gives cameras only to pages on this machine (localhost) or with https.",
    cameraRefused: "No camera: {error}",
    fits: "Fits: {taken} of {free} GiB",
    fitsBarely: "Fits barely: {taken} of {free} GiB",
    doesNotFit: "Does not fit: {lacks} GiB are missing",
    activations: "{size} to compute in",
    window: "{size} for weights on their way",
    ramEachStep: "RAM: {size} GiB of each step come from the disk",
    ramEachPrompt: "RAM: a new prompt reads {size} GiB again",
    aStep: "{seconds} a step",
    inAll: "{steps} steps {time}",
    atMost: "at most {time}",
    timeUnknown: "Time: known once it has sampled here",
    sourceMEASURED: "measured here",
    sourceSCALED: "by a run here at another size",
    sourceCARD: "by kernels measured on such a card",
    sourcePREDICTED: "predicted",
    faster: "Faster:",
    wouldFit: "Would fit:",
    nothingFits: "No smaller size would fit: close what else uses the card, or take a smaller file",
    changeQuality: "quality {quality}",
    changeSteps: "a {steps}-step LoRA",
    or: " or ",
    changeFrames: "{frames} frames",
    auto_INT8: "as stored, INT8 products, FP32 sums in attention",
    auto_INT4: "as stored, INT4 products, FP32 sums in attention",
    auto_INT4_ASKS_FP16: "INT4 weights made FP16, as the file asks, FP32 sums",
    auto_INT4_AS_FP16: "INT4 weights made FP16, which this card multiplies as fast, FP32 sums",
    auto_INT8_ASKS_FP16: "INT8 weights made FP16, as the file asks, FP32 sums",
    auto_INT8_AS_FP16: "INT8 weights made FP16, which this card multiplies as fast, FP32 sums",
    auto_FP16: "as stored, FP16 products, FP32 sums",
    auto_MADE_FP16: "weights made FP16, FP16 products, FP32 sums",
    auto_PACKED: "packed weights made FP16 for each product, FP32 sums",
    auto_FP8: "as stored, fp8 products by ComfyUI, FP32 sums in attention",
    auto_FP8_AS_FP16: "fp8 weights made FP16 for each product, FP32 sums",
    auto_STOCK: "as stored, products by ComfyUI, FP32 sums in attention",
    noEstimate: "No estimate:",
    willFail: "This will not run:",
    unknown_noSampler: "no sampler takes this model yet.",
    unknown_noFile: "{file} is not there. Put it into {folder} and press R, or choose another.",
    unknown_noLatent: "{node} has no latent yet.",
    unknown_noValue: "{node} has no number for its {what}.",
    unknown_noSteps: "{node} computes no step.",
    unknown_computed: "{what} is computed by {node} as it runs.",
    unknown_sizeOf: "the size follows from {node} as it runs.",
    unknown_stepsOf: "the steps follow from {node} as it runs.",
    unknown_guidanceOf: "{node} has a guidance of its own.",
    unknown_samplesItself: "what {node} samples is its own affair.",
    unknown_twoModels: "two models meet in {node}.",
    unknown_whole: "ComfyUI's own memory management has this model.",
    unknown_later: "another file is read first; it comes by itself.",
    unknown_tooMuch: "this workflow is too large to be read in two seconds.",
    unknown_said: "{sentence}",
    unknown_fails: "{sentence}",
}

let translated = {}
api.getCustomNodesI18n().then(
    all => { translated = all },
    () => {}, // then it is English, as where a language has none of ours
)

/** A text with its {names} filled in. */
export function words(key, values = {}) {
    const language = app.extensionManager.setting.get("Comfy.Locale")
    const text = translated[language]?.fuseStream?.[key] ?? ENGLISH[key]
    return text.replace(/{(\w+)}/g, (_, name) => values[name])
}

/** A menu's entry as the menu has it. */
export function translatedLabel(label) {
    return translated[app.extensionManager.setting.get("Comfy.Locale")]?.menuLabels?.[label] ?? label
}
