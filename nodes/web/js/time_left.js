// The time that is left of a sampling, in the tab's title and in the panel; on the loader it stands by itself (nodes/page/meter.py).
// The server says it at each step, and between two steps it is counted down here. The front end writes the title anew whenever
// something has gone on: what is left then comes before it again, because a tab shows the beginning.

import { api } from "../../../scripts/api.js"
import { app } from "../../../scripts/app.js"
import { shortTime } from "./units.js"
import { words } from "./words.js"

const EVENT = "fusestream.left"
const ENDS = ["execution_success", "execution_error", "execution_interrupted"]
const EVERY = 1000 // milliseconds between two counts
const SHORTEST = 5 // seconds of a sampling that is over sooner than anybody looks

let until = 0 // when it is over, on the page's clock; 0: nobody knows
let before = "" // what is before the title now
let timer

const listeners = new Set()

/** Call this with the words for what is left, or "", whenever they change. Returns how to end that. */
export function onTimeLeft(listener) {
    listeners.add(listener)
    listener(told())
    return () => listeners.delete(listener)
}

const told = () => (until ? words("timeLeft", { time: shortTime(Math.max(0, (until - performance.now()) / 1000)) }) : "")

function hear(seconds) {
    const isKnown = seconds !== null && (until !== 0 || seconds >= SHORTEST)
    until = isKnown ? performance.now() + 1000 * seconds : 0
    clearInterval(timer)
    if (isKnown) timer = setInterval(show, EVERY)
    show()
}

function show() {
    const now = told(), bare = document.title.startsWith(before) ? document.title.slice(before.length) : document.title
    before = now && `${now} · `
    if (document.title !== before + bare) document.title = before + bare
    for (const listener of listeners) listener(now)
}

app.registerExtension({
    name: "FuseStream.TimeLeft",
    setup() {
        api.addEventListener(EVENT, ({ detail }) => hear(detail.seconds))
        for (const end of ENDS) api.addEventListener(end, () => hear(null))
        const again = () => document.title.startsWith(before) || show()
        new MutationObserver(again).observe(document.querySelector("title"), { childList: true, characterData: true, subtree: true })
    },
})
