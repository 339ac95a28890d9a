// The camera of the Live Video node: its picture and its button on the node. While a node runs that wants it, frames go to the server
// (nodes/camera.py), as many as it asks for and no more than the connection takes.

import { app } from "../../../scripts/app.js"
import { api } from "../../../scripts/api.js"
import { nodeOf } from "./places.js"
import { button } from "./text_box.js"
import { words } from "./words.js"

const NODE = "FuseStreamLiveVideo"
const EVENT = "fusestream.camera"
const LEAST = 60, HIGHER = 200 // the box's height, and while the camera is on
const QUALITY = 0.9 // of a JPEG
const ON_ITS_WAY = 1 << 18 // bytes that may wait in the connection: then a frame is left out
const STYLE = `
.fusestream-camera { display: flex; flex-direction: column; gap: 4px; min-height: 0; pointer-events: auto; align-items: stretch }
.fusestream-camera video { flex: 1; min-height: 0; object-fit: contain; background: var(--comfy-input-bg); border-radius: 4px }
.fusestream-camera video[hidden] { display: none }
.fusestream-camera p { margin: 0; font: 11px/1.35 sans-serif; color: var(--input-text); overflow-wrap: anywhere }
.fusestream-camera p:empty { display: none }
`
document.head.append(Object.assign(document.createElement("style"), { textContent: STYLE }))

class Camera {
    constructor() {
        this.element = document.createElement("div")
        this.element.className = "fusestream-camera fusestream-buttoned"
        this.video = Object.assign(document.createElement("video"), { muted: true, autoplay: true, playsInline: true, hidden: true })
        this.said = document.createElement("p")
        this.said.setAttribute("role", "status")
        this.element.append(this.video, this.said)
        this.button = button(this.element, words("useCamera"), () => (this.stream ? this.off() : this.on()), words("cameraTooltip"))
        this.canvas = document.createElement("canvas")
    }

    get height() {
        return this.stream ? HIGHER : LEAST
    }

    /** Ask the browser for it. Whether it is on. */
    async on() {
        if (this.stream) return true
        if (this.asking) return this.asking
        this.asking = this.#ask().finally(() => { this.asking = undefined })
        return this.asking
    }

    async #ask() {
        this.said.textContent = ""
        if (!navigator.mediaDevices) {
            this.said.textContent = words("cameraInsecure")
            return false
        }
        try {
            this.stream = await navigator.mediaDevices.getUserMedia({ video: { width: { ideal: 1280 }, height: { ideal: 720 } } })
        } catch (error) {
            this.said.textContent = words("cameraRefused", { error: error.message })
            return false
        }
        this.video.srcObject = this.stream
        this.video.hidden = false
        this.button.textContent = words("stopCamera")
        for (const track of this.stream.getTracks()) track.addEventListener("ended", () => this.off())
        await this.video.play()
        this.changed?.()
        return true
    }

    /** The light goes out, and a run ends with what it has. */
    off() {
        if (this.socket?.readyState === WebSocket.OPEN) this.socket.send("stop")
        this.#hangUp()
        for (const track of this.stream?.getTracks() ?? []) track.stop()
        this.stream = undefined
        this.video.srcObject = null
        this.video.hidden = true
        this.button.textContent = words("useCamera")
        this.changed?.()
    }

    /** A run wants frames. The server asks until it is answered. */
    async send({ word, width, height, fps }) {
        if (this.word === word) return
        this.word = word
        const isOn = await this.on()
        const address = new URL(api.apiURL(`/fusestream/live/camera?word=${encodeURIComponent(word)}`), location.href)
        address.protocol = location.protocol === "https:" ? "wss:" : "ws:"
        const socket = new WebSocket(address)
        this.socket = socket
        socket.addEventListener("open", () => {
            if (isOn) this.timer = setInterval(() => this.#frame(socket, width, height), 1000 / fps)
            else socket.send(`refused ${this.said.textContent}`)
        })
        socket.addEventListener("close", () => { if (this.socket === socket) this.#hangUp() })
    }

    /** The run has ended; the camera stays for the next one. */
    end() {
        this.#hangUp()
    }

    #hangUp() {
        clearInterval(this.timer)
        this.socket?.close()
        this.socket = this.word = undefined
    }

    #frame(socket, width, height) {
        const { video, canvas } = this
        if (this.drawing || socket.readyState !== WebSocket.OPEN || socket.bufferedAmount > ON_ITS_WAY || !video.videoWidth) return
        canvas.width = width || video.videoWidth
        canvas.height = height || video.videoHeight
        // As large as it may be, its middle in the middle.
        const scale = Math.max(canvas.width / video.videoWidth, canvas.height / video.videoHeight)
        const wide = video.videoWidth * scale, high = video.videoHeight * scale
        canvas.getContext("2d").drawImage(video, (canvas.width - wide) / 2, (canvas.height - high) / 2, wide, high)
        this.drawing = true
        canvas.toBlob(blob => {
            this.drawing = false
            if (blob && socket.readyState === WebSocket.OPEN) socket.send(blob)
        }, "image/jpeg", QUALITY)
    }
}

const cameras = new WeakMap() // node -> its camera

app.registerExtension({
    name: "FuseStream.Camera",
    nodeCreated(node) {
        if (node.comfyClass !== NODE) return
        const camera = new Camera()
        cameras.set(node, camera)
        const options = { serialize: false, getMinHeight: () => camera.height, getMaxHeight: () => camera.height, margin: 10 }
        const widget = node.addDOMWidget("fusestream_camera", "fusestream_camera", camera.element, options)
        widget.serialize = false // it is no input: neither a workflow nor a prompt has it
        camera.changed = () => {
            node.setSize([node.size[0], Math.max(node.size[1], node.computeSize()[1])])
            app.canvas.setDirty(true, true)
        }
        const onRemoved = node.onRemoved
        node.onRemoved = function () {
            onRemoved?.call(this)
            camera.off()
        }
    },
    setup() {
        api.addEventListener(EVENT, ({ detail }) => {
            const camera = cameras.get(nodeOf(detail.node))
            if (detail.word === null) camera?.end()
            else camera?.send(detail)
        })
    },
})
