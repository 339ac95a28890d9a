// Commands that swap the loaders in the open workflow, subgraphs too: ComfyUI's for FuseStream's, and back. Like undo and redo they
// hand the front end a workflow to show in the place of the one that is open, so that one undo takes all of it back.

import { app } from "../../../scripts/app.js"
import { swap } from "./swap.js"
import { say } from "./toasts.js"
import { words } from "./words.js"

const OURS_COMMAND = "FuseStream.UseFuseStreamLoaders"
const THEIRS_COMMAND = "FuseStream.UseComfyUILoaders"
const OURS_MENU_LABEL = "Use FuseStream loaders"
const THEIRS_MENU_LABEL = "Use ComfyUI loaders"
const SHOWN = 6000 // milliseconds for which it is said that all went well

const saved = () => JSON.parse(JSON.stringify(app.rootGraph.serialize()))

async function useLoaders(toOurs) {
    const workflow = saved()
    const { count, stays } = swap(workflow, toOurs)
    if (count) await show(workflow)
    const said = stays.map(({ key, values }) => words(key, values))
    if (count) said.unshift(words(`${count === 1 ? "one" : "many"}${toOurs ? "Ours" : "Theirs"}`, { count }))
    if (!said.length) said.push(words(toOurs ? "noneOfTheirs" : "noneOfOurs"))
    say(stays.length ? "warn" : count ? "success" : "info", "FuseStream", said.join("\n"), stays.length ? undefined : SHOWN)
}

/** Show a workflow in the place of the one that is open, as one change. */
async function show(workflow) {
    const tracker = app.extensionManager.workflow.activeWorkflow.changeTracker
    tracker.captureCanvasState() // what was changed before is a step of its own
    tracker.redoQueue.splice(0, tracker.redoQueue.length, workflow)
    await tracker.redo()
    tracker.activeState = saved() // nodes that had to grow are no further change
}

app.registerExtension({
    name: "FuseStream.UseLoaders",
    commands: [
        {
            id: OURS_COMMAND, label: "FuseStream: use FuseStream loaders in this workflow", menubarLabel: OURS_MENU_LABEL,
            icon: "pi pi-bolt", function: () => useLoaders(true),
        },
        {
            id: THEIRS_COMMAND, label: "FuseStream: use ComfyUI loaders in this workflow", menubarLabel: THEIRS_MENU_LABEL,
            icon: "pi pi-replay", function: () => useLoaders(false),
        },
    ],
    menuCommands: [{ path: ["FuseStream"], commands: [OURS_COMMAND, THEIRS_COMMAND] }],
})
