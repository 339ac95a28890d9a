// The notes of our examples in the user's language, put in as a workflow opens: ComfyUI translates nodes, and no notes. One that
// somebody has changed stays as it is, and so does a workflow that was saved with them.

import { app } from "../../../scripts/app.js"

const TYPE = "MarkdownNote"
const LANGUAGES = ["ja", "zh"]

let fetched = {} // of each language the notes, by their English texts

async function notesIn(language) {
    fetched[language] ??= fetch(new URL(`../notes/${language}.json`, import.meta.url)).then(answer => answer.json())
    try {
        return await fetched[language]
    } catch { // then they stay in English, until the next workflow
        delete fetched[language]
        return {}
    }
}

app.registerExtension({
    name: "FuseStream.Notes",
    async afterConfigureGraph() {
        const language = app.extensionManager.setting.get("Comfy.Locale")
        const notes = app.graph.nodes.filter(node => node.type === TYPE && node.widgets?.length)
        if (!notes.length || !LANGUAGES.includes(language)) return
        const said = await notesIn(language)
        for (const node of notes) {
            const translated = said[node.widgets[0].value]
            if (!translated) continue
            node.widgets[0].value = translated.text
            node.title = translated.title
        }
    },
})
