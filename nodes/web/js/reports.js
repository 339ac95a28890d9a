// The reports of the last runs side by side, as a FuseStream Report node shows each: its picture and its text.

import { api } from "../../../scripts/api.js"
import { openDialog } from "./dialog.js"
import { TextBox } from "./text_box.js"
import { isDark } from "./theme.js"
import { words } from "./words.js"

const LEAST = 420 // a report's width; where not all have room, they scroll
const STYLE = `
.fusestream-reports { flex: 1; min-height: 0; display: grid; grid-auto-flow: column; grid-auto-columns: minmax(${LEAST}px, 1fr); gap: 12px; overflow-x: auto }
.fusestream-reports section { display: flex; flex-direction: column; gap: 8px; min-height: 0 }
.fusestream-reports h3 { margin: 0; font-size: 14px; overflow-wrap: anywhere }
.fusestream-reports img { width: 100%; min-height: 0; max-height: 60%; object-fit: contain; object-position: top }
.fusestream-dialog:has(.fusestream-reports) { width: min(96vw, calc(var(--reports) * 900px)) }
`
document.head.append(Object.assign(document.createElement("style"), { textContent: STYLE }))

/** When a report was made, in the user's way to write it. */
export const timeOf = report => new Date(report.when * 1000).toLocaleTimeString()

export function showReports(reports) {
    const all = document.createElement("div"), buttons = document.createElement("div")
    all.className = "fusestream-reports"
    buttons.className = "fusestream-buttons"
    for (const report of reports) all.append(column(report))
    openDialog(words("lastRuns"), all, buttons).style.setProperty("--reports", reports.length)
}

function column(report) {
    const section = document.createElement("section"), title = document.createElement("h3"), box = new TextBox()
    const theme = isDark() ? "dark" : "light"
    title.textContent = `${timeOf(report)} ${report.title}`
    const picture = Object.assign(document.createElement("img"), {
        src: api.apiURL(`/fusestream/reports/${report.id}/picture?theme=${theme}`), alt: title.textContent,
    })
    box.text = report.text
    section.append(title, picture, box.element)
    return section
}
