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
    examining: "Looking at this machine: some seconds...",
    noAnswer: "ComfyUI's server did not answer: {error}. Is it still running?",
    swapped: "Swapped: {count}. Undo takes it back.",
    noneOfTheirs: "Nothing to swap: this workflow has no Load Diffusion Model, Load CLIP, Load VAE, nor those for GGUF files.",
    noneOfOurs: "Nothing to swap: this workflow has no FuseStream loader.",
    noPlace: "{title} stays: FuseStream has no loader in its place.",
    notThere: "{title} stays: {loader} is not installed.",
    notOffered: "{title} stays: {loader} has no choice like its {widget}, {value}.",
    noInput: "{title} stays: its {widget} comes by a link, and {loader} has no such input.",
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
