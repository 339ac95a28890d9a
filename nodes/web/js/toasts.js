// What went wrong with a node of ours, or should be known of a run, as a toast with the whole sentence: the front end itself
// says only that a node threw an error or rejected a value, and has the sentence behind a button.

import { app } from "../../../scripts/app.js"
import { api } from "../../../scripts/api.js"
import { nodeOf } from "./places.js"

const OURS = "FuseStream"
const ERRORS = "fusestream." // what the types of the pack's own errors begin with
// ComfyUI's general advice on memory, which it puts below every error of that kind: ours say what to do.
const ADVICE = "\nThis error means you ran out of memory"

// File names are long and have no spaces; a message may have lines of its own. The front end's own box about the error is in
// the same corner, as high as this at most, and has a button.
const STYLE = `
.fusestream-toast .p-toast-detail { overflow-wrap: anywhere; white-space: pre-line; max-height: 40vh; overflow-y: auto; user-select: text }
.fusestream-toast .p-toast-message-text { min-width: 0 }
body:has([data-testid=error-overlay]) .p-toast-top-right:has(.fusestream-toast) { margin-top: 165px }
`
document.head.append(Object.assign(document.createElement("style"), { textContent: STYLE }))

const shown = new Map() // sentence -> toast

/** It stays until it is closed or something is run again, or for so many milliseconds. */
export function say(severity, summary, sentence, life) {
    if (shown.has(sentence)) remove(shown.get(sentence))
    const toast = { id: `fusestream-${sentence}`, severity, summary, detail: sentence, styleClass: "fusestream-toast", life }
    shown.set(sentence, toast)
    add(toast)
}

// Front end 1.58 knows a toast by its id, and each kind has its own method there; what its `add` has shown, nobody can remove.
const KINDS = { warn: "warning" }

function add(toast) {
    const toasts = app.extensionManager.toast, { id, severity, summary, detail, life } = toast
    if (toasts.remove) toasts.add(toast)
    else toasts[KINDS[severity] ?? severity](summary, { id, description: detail, duration: life })
}

function remove(toast) {
    const toasts = app.extensionManager.toast
    if (toasts.remove) toasts.remove(toast)
    else toasts.dismiss(toast.id)
}

const show = (severity, node, sentence) => say(severity, nodeOf(node)?.getTitle() ?? OURS, sentence)

function clear() {
    for (const toast of shown.values()) remove(toast)
    shown.clear()
}

/** What the server refused to queue: the sentences of our nodes. Each comes once for every input that was looked at. */
function showRefused(nodes) {
    for (const [id, { class_type, errors }] of Object.entries(nodes ?? {})) {
        if (!class_type.startsWith(OURS)) continue
        const sentences = new Set()
        for (const { type, details, extra_info } of errors) {
            const named = `${extra_info?.input_name} - `
            if (type === "custom_validation_failed" && details.startsWith(named)) sentences.add(details.slice(named.length))
        }
        for (const sentence of sentences) show("error", id, sentence)
    }
}

// No event tells of a prompt that the server refuses: its answer is looked at on its way to the front end.
const queuePrompt = api.queuePrompt
api.queuePrompt = async function (...args) {
    try {
        const answer = await queuePrompt.apply(this, args)
        showRefused(answer?.node_errors)
        return answer
    } catch (error) {
        showRefused(error?.response?.node_errors)
        throw error
    }
}

app.registerExtension({
    name: "FuseStream.Toasts",
    setup() {
        api.addEventListener("promptQueueing", clear)
        api.addEventListener("execution_error", ({ detail }) => {
            if (!detail.exception_type.startsWith(ERRORS)) return
            // The front end's own box keeps this very object, and draws it after this.
            detail.exception_message = detail.exception_message.split(ADVICE)[0].trim()
            show("error", detail.node_id, detail.exception_message)
        })
        api.addEventListener("fusestream.notice", ({ detail }) => show("warn", detail.node, detail.sentence))
    },
})
