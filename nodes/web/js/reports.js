// The reports of the last runs side by side, as a FuseStream Report node shows each: its picture and its text. Two of them as
// FuseStream Compare does: both pictures, and what differs.

import { api } from "../../../scripts/api.js"
import { openDialog } from "./dialog.js"
import { TextBox } from "./text_box.js"
import { isDark } from "./theme.js"
import { duration } from "./units.js"
import { words } from "./words.js"

const PATH = "/fusestream/reports"
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

/** What was run: its size, its steps, how long they took, and what share of that was waiting; of what has no steps, one pass. */
export function runOf({ run, seconds, stall }) {
    const percent = seconds ? Math.round((100 * stall) / seconds) : 0
    if (!run) return seconds ? words("aPass", { seconds: duration(seconds), percent }) : ""
    const { size, frames, steps } = run
    const what = [size, frames && words("changeFrames", { frames }), words("steps", { steps })].filter(Boolean).join(", ")
    return words("ran", { what, all: run.all, step: run.step }) + (percent ? `, ${words("waiting", { percent })}` : "")
}

/** An answer of the server's that is not kept. */
export async function asked(path) {
    const answer = await api.fetchApi(path, { cache: "no-store" })
    if (!answer.ok) throw new Error(`${answer.status} ${answer.statusText}`)
    return answer.json()
}

/** The last runs' reports, the newest first. */
export const askedReports = async () => (await asked(PATH)).reports

/** The newest of these reports, and the one before it of the same model; each may be missing. */
export const lastTwo = ([now, ...others]) => [now, now && others.find(one => one.title === now.title)]

export function showReports(reports) {
    show(words("lastRuns"), reports.map(columnOf), reports.length)
}

/** One run's report by itself. */
export function showOne(report) {
    show(words("report"), [columnOf(report)], 1)
}

/** Two reports: A is the earlier one. */
export async function showPair(before, now) {
    const { text } = await asked(`${PATH}/${before.id}/${now.id}`)
    const title = `${now.title}: A ${timeOf(before)}, B ${timeOf(now)}`
    show(words("compareWithLast"), [column(`${before.id}/${now.id}`, title, text)], 2)
}

function show(title, columns, widths) {
    const all = document.createElement("div"), buttons = document.createElement("div")
    all.className = "fusestream-reports"
    buttons.className = "fusestream-buttons"
    all.append(...columns)
    openDialog(title, all, buttons).style.setProperty("--reports", widths)
}

const columnOf = report => column(String(report.id), `${timeOf(report)} ${report.title}`, report.text)

/** path: of the report, or of two. */
function column(path, titled, text) {
    const section = document.createElement("section"), title = document.createElement("h3"), box = new TextBox()
    title.textContent = titled
    const picture = Object.assign(document.createElement("img"), {
        src: api.apiURL(`${PATH}/${path}/picture?theme=${isDark() ? "dark" : "light"}`), alt: titled,
    })
    box.text = text
    section.append(title, picture, box.element)
    return section
}
